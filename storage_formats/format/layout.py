"""The shape of an index, and the paths and lengths of its files (SPEC.md sections 3 and
6). This module does not access the disk.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from storage_formats.errors import UsageError

FORMAT = "edje-index"
FORMAT_VERSION = "3.0"
ROOT = "index.json"
# name of the array in `tokens/` that holds the offset block
OFFSET_ARRAY = "offset"
# default number of rows per shard
SHARD_SIZE = 1024
# The length of a token file is a multiple of this number of bytes.
PAGE_BYTES = 4096
# Each entry in the shard index of the Zarr sharding codec is two uint64: the offset and
# the length of a record. The shard index ends with the CRC-32C of all entries.
INDEX_ENTRY_BYTES = 16
CRC_BYTES = 4
# paths of the files of a shard, relative to the index; the field is the shard number
STAGED_ROWS_FILE = "build/rows/{:08d}.parquet"
EMBEDDING_FILE = "embeddings/c.{}.0"
# paths of files that are named after their CRC-32C, which is the field
SHARD_TABLE_FILE = "manifest/shards-{:08x}.parquet"
TOMBSTONES_FILE = "manifest/deleted-{:08x}.bin"
REMOVED_FILE = "manifest/removed-{:08x}.bin"
ROWS_FILE = "rows/rows-{:08x}.parquet"
ANN_FILE = "ann/index-{:08x}.faiss"

# the directories with the files that shard tables list, and with those that manifests
# list
SHARD_FOLDERS = ("embeddings", "tokens", "checksums")
OWN_FOLDERS = ("manifest", "rows", "ann")


@dataclass(frozen=True)
class Segment:
    """A range of consecutive rows, written by one build or append (SPEC.md section 12).

    Attributes:
        first_row: first row id of the segment, a multiple of the shard size.
        rows: number of rows.
    """

    first_row: int
    rows: int

    @property
    def stop(self) -> int:
        """The row id after the last row of the segment."""
        return self.first_row + self.rows


@dataclass(frozen=True)
class OffsetBlock:
    """Describes the offset block of an index, without its values (SPEC.md section 6.2).

    Attributes:
        crc32c: CRC-32C of the values.
        precisions: names of the precisions that are encoded with the offset.
    """

    crc32c: int
    precisions: tuple[str, ...]


@dataclass(frozen=True)
class IndexSpec:
    """The shape of an index. It determines which shards exist, and the length of each
    file of tokens, embeddings and checksums.

    Attributes:
        rows: number of row ids, including those of holes and those outside all
            segments. Row ids are in 0..rows - 1.
        shard_size: rows per shard. The last shard of a segment may have fewer rows.
        block_shape: (m, d), tokens per block and values per token.
        embed_dim: width of the embeddings.
        precisions: names of the precisions, see `storage_formats.precisions`.
        segments: the segments in ascending order. An empty tuple means one segment with
            all rows; see `used_segments`.
        offset: the offset block; None if no precision has an offset.

    Raises:
        UsageError: a number is not positive; or the segments overlap, do not ascend, or
            do not match `rows` and `shard_size`.

    Examples:
        >>> from storage_formats import IndexSpec
        >>> spec = IndexSpec(
        ...     rows=2500,
        ...     shard_size=1024,
        ...     block_shape=(64, 384),
        ...     embed_dim=512,
        ...     precisions=("fp8",),
        ... )
        >>> spec.shards, spec.shard_rows(2)
        (3, range(2048, 2500))
    """

    rows: int
    shard_size: int
    block_shape: tuple[int, int]
    embed_dim: int
    precisions: tuple[str, ...] = ("bf16",)
    segments: tuple[Segment, ...] = field(default=(), repr=False)
    offset: OffsetBlock | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        numbers = (self.rows, self.shard_size, *self.block_shape, self.embed_dim)
        if min(numbers) < 1 or len(numbers) != 5:
            raise UsageError(
                "rows, shard_size, block_shape and embed_dim must be positive, got"
                f" {self}"
            )
        used = self.used_segments
        apart = all(
            left.stop <= right.first_row for left, right in itertools.pairwise(used)
        )
        aligned = not any(segment.first_row % self.shard_size for segment in used)
        positive = used[0].first_row >= 0 and min(each.rows for each in used) > 0
        spans = positive and used[-1].stop == self.rows
        if not (apart and aligned and spans):
            raise UsageError(
                f"the segments {used} do not fit {self.rows} rows in shards of"
                f" {self.shard_size}: every segment must start at a multiple of"
                f" {self.shard_size}, and the last segment must end at row {self.rows}"
            )

    @property
    def used_segments(self) -> tuple[Segment, ...]:
        """The segments of the index: `segments`, or one segment with all rows if
        `segments` is empty.
        """
        return self.segments or (Segment(0, self.rows),)

    @property
    def shards(self) -> int:
        """Number of shards that the row ids 0..rows - 1 span. Shards outside all
        segments are included, but have no files.
        """
        return -(-self.rows // self.shard_size)

    def shard_numbers(self) -> Iterator[int]:
        """Yield the number of each shard that has files, in ascending order."""
        return itertools.chain.from_iterable(
            map(self.segment_shards, self.used_segments)
        )

    @property
    def used_rows(self) -> int:
        """Number of rows in all segments."""
        return sum(segment.rows for segment in self.used_segments)

    @property
    def used_shards(self) -> int:
        """Number of shards in all segments."""
        return sum(len(self.segment_shards(segment)) for segment in self.used_segments)

    def segment_shards(self, segment: Segment) -> range:
        """Return the shard numbers of `segment`."""
        return range(
            segment.first_row // self.shard_size, -(-segment.stop // self.shard_size)
        )

    def used_ranges(self, first_shard: int, stop_shard: int) -> list[range]:
        """Return the row ids of the shards `first_shard`..`stop_shard` - 1 that belong
        to a segment, as ascending ranges.
        """
        first = first_shard * self.shard_size
        stop = stop_shard * self.shard_size
        used = self.used_segments
        # Only the last segment that begins at or before the first row can contain it.
        before = bisect.bisect_right(used, first, key=lambda each: each.first_row)
        ranges = []
        for number in range(max(0, before - 1), len(used)):
            segment = used[number]
            if segment.first_row >= stop:
                break
            rows = range(max(segment.first_row, first), min(segment.stop, stop))
            if rows:
                ranges.append(rows)
        return ranges

    def shard_rows(self, shard: int) -> range:
        """Return the row ids of `shard`. The range is empty if the shard belongs to no
        segment.

        Raises:
            UsageError: `shard` is out of range.
        """
        if not 0 <= shard < self.shards:
            raise UsageError(f"shard must be in 0..{self.shards - 1}, got {shard}")
        ranges = self.used_ranges(shard, shard + 1)
        return ranges[0] if ranges else range(0)


def padded_shard_bytes(
    rows: int, shard_size: int, record_bytes: int
) -> tuple[int, int]:
    """Return (offset of the shard index, length of the file) in bytes for the token
    file of a shard with `rows` rows. Padding before the shard index makes the length a
    multiple of `PAGE_BYTES`.
    """
    index_bytes = shard_size * INDEX_ENTRY_BYTES + CRC_BYTES
    total = rows * record_bytes + index_bytes
    total = -(-total // PAGE_BYTES) * PAGE_BYTES
    return total - index_bytes, total


def token_file(precision: str, record_ndim: int = 2) -> str:
    """Return the relative path of the token files of a precision, with a field for the
    shard number.

    Args:
        record_ndim: number of dimensions of a record in the Zarr array.
    """
    return f"tokens/{precision}/c.{{}}" + ".0" * record_ndim


def checksum_file(precision: str) -> str:
    """Return the relative path of the checksum files of a precision, with a field for
    the shard number.
    """
    return f"checksums/{precision}/{{:08d}}.crc32c"


class _Below:
    """Descriptor for an attribute of `Layout`. Its value is the path `path` below the
    root of the layout.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, layout: Layout, _: object) -> Path:
        return layout.root / self._path


@dataclass(unsafe_hash=True)
class Layout:
    """The paths of all files of the index at `root` (SPEC.md section 3)."""

    root: Path

    manifest = _Below(ROOT)
    tokens = _Below("tokens")
    offset_values = _Below(f"tokens/{OFFSET_ARRAY}/c.0.0")
    embeddings = _Below("embeddings")
    rows = _Below("rows")
    ann = _Below("ann")
    build = _Below("build")
    journal = _Below("build/journal.json")
    claim = _Below("build/claim.json")
    lock = _Below("build/lock")
    input_lists = _Below("build/inputs")
    staging = _Below("build/staging")
    receipts = _Below("build/receipts")
    erased = _Below("build/erased")
    snapshots = _Below("snapshots")

    def token_array(self, precision: str) -> Path:
        return self.tokens / precision

    def shard_folders(self) -> list[Path]:
        """Return all directories with files that the shard tables list."""
        return [self.root / name for name in SHARD_FOLDERS]

    def own_folders(self) -> list[Path]:
        """Return all directories whose data files are listed in the manifest itself,
        and not in shard tables.
        """
        return [self.root / name for name in OWN_FOLDERS]

    def old_folders(self) -> list[Path]:
        """Return the directories that only earlier formats have. An upgrade that was
        killed leaves them.
        """
        return [self.root / "filters", self.root / "hashes"]

    def data_folders(self) -> list[Path]:
        """Return all directories that contain committed files, except the root and
        `snapshots/`.
        """
        return [*self.shard_folders(), *self.own_folders()]

    def token_shard(self, precision: str, shard: int, record_ndim: int = 2) -> Path:
        return self.root / token_file(precision, record_ndim).format(shard)

    def embedding_shard(self, shard: int) -> Path:
        return self.root / EMBEDDING_FILE.format(shard)

    def checksums(self, precision: str, shard: int) -> Path:
        return self.root / checksum_file(precision).format(shard)

    def staged_rows(self, shard: int) -> Path:
        return self.root / STAGED_ROWS_FILE.format(shard)

    def snapshot(self, number: int) -> Path:
        return self.root / "snapshots" / f"{number:08d}.json"

    def input_list(self, number: int) -> Path:
        return self.input_lists / f"{number:08d}.parquet"

    def receipt(self, shard: int) -> Path:
        return self.build / "receipts" / f"{shard:08d}.json"

    def relative(self, path: Path) -> str:
        """Return `path` relative to the root, with forward slashes."""
        return path.relative_to(self.root).as_posix()
