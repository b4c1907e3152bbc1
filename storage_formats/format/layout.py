"""All paths, names and offsets of an index as pure functions, without access to the disk.

SPEC.md, sections 3 and 6, is the normative text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from storage_formats.errors import UsageError

FORMAT = "edje-index"
FORMAT_VERSION = "1.0"
PAGE_BYTES = 4096
INDEX_ENTRY_BYTES = 16  # offset and length of the Zarr sharding codec, two uint64
CRC_BYTES = 4


@dataclass(frozen=True)
class IndexSpec:
    """The shape of an index. It determines the layout of every file.

    Attributes:
        rows: number of inputs, holes included.
        shard_size: rows per shard; the last shard may hold fewer.
        block_shape: (m, d), tokens per block and values per token.
        embed_dim: width of the embeddings.
        precisions: names of the precisions, see `storage_formats.precisions`.

    Raises:
        UsageError: a number is not positive.

    Example:
        >>> from storage_formats import IndexSpec
        >>> spec = IndexSpec(rows=2500, shard_size=1024, block_shape=(64, 384), embed_dim=512, precisions=("fp8",))
        >>> spec.shards, spec.shard_rows(2)
        (3, range(2048, 2500))
    """

    rows: int
    shard_size: int
    block_shape: tuple[int, int]
    embed_dim: int
    precisions: tuple[str, ...] = ("bf16",)

    def __post_init__(self) -> None:
        numbers = (self.rows, self.shard_size, *self.block_shape, self.embed_dim)
        if min(numbers) < 1:
            raise UsageError(f"rows, shard_size, block_shape and embed_dim must be positive, got {self}")

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.rows // self.shard_size)

    def shard_rows(self, shard: int) -> range:
        """Row ids of `shard`."""
        if not 0 <= shard < self.shards:
            raise UsageError(f"shard must be in 0..{self.shards - 1}, got {shard}")
        first = shard * self.shard_size
        return range(first, min(first + self.shard_size, self.rows))


def padded_shard_bytes(rows: int, shard_size: int, record_bytes: int) -> tuple[int, int]:
    """(offset of the shard index, length of the file) of a token shard with `rows` records, in bytes."""
    index_bytes = shard_size * INDEX_ENTRY_BYTES + CRC_BYTES
    total = rows * record_bytes + index_bytes
    total = -(-total // PAGE_BYTES) * PAGE_BYTES
    return total - index_bytes, total


@dataclass(frozen=True)
class Layout:
    """Paths of the index at `root`."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "index.json"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens"

    @property
    def embeddings(self) -> Path:
        return self.root / "embeddings"

    @property
    def rows(self) -> Path:
        return self.root / "rows"

    @property
    def ann(self) -> Path:
        return self.root / "ann"

    @property
    def ann_index(self) -> Path:
        return self.ann / "index.faiss"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def plan(self) -> Path:
        return self.build / "plan.json"

    @property
    def lock(self) -> Path:
        return self.build / "lock"

    @property
    def writer(self) -> Path:
        return self.build / "writer"

    @property
    def staging(self) -> Path:
        return self.build / "staging"

    def token_array(self, precision: str) -> Path:
        return self.tokens / precision

    def zarr_files(self, precisions: Iterable[str]) -> list[Path]:
        """Paths of every `zarr.json`: of the group of tokens, of the embeddings, and of each precision."""
        return [folder / "zarr.json" for folder in (self.tokens, self.embeddings, *map(self.token_array, precisions))]

    def token_shard(self, precision: str, shard: int, record_ndim: int = 2) -> Path:
        return self.token_array(precision) / ".".join(["c", str(shard), *["0"] * record_ndim])

    def embedding_shard(self, shard: int) -> Path:
        return self.embeddings / f"c.{shard}.0"

    def checksums(self, precision: str, shard: int) -> Path:
        return self.root / "checksums" / precision / f"{shard:08d}.crc32c"

    def rows_file(self, shard: int) -> Path:
        return self.rows / f"{shard:08d}.parquet"

    def shard_table(self, crc32c: int) -> Path:
        return self.root / "manifest" / f"shards-{crc32c:08x}.parquet"

    def inputs(self, shard: int) -> Path:
        return self.build / "inputs" / f"{shard:08d}.parquet"

    def receipt(self, shard: int) -> Path:
        return self.build / "receipts" / f"{shard:08d}.json"

    def attempt(self, shard: int) -> Path:
        return self.build / "attempts" / f"{shard:08d}.json"

    def pieces(self, shard: int) -> Path:
        return self.build / "pieces" / f"{shard:08d}"

    def relative(self, path: Path) -> str:
        """`path` relative to the root, with forward slashes, as manifests store it."""
        return path.relative_to(self.root).as_posix()
