"""Repair of damaged token files and checksum files (SPEC.md section 12.3).

The contents of a damaged file are computed again from other files of the index or from
the sources of the images. A file is replaced only if the result has exactly the
committed bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from storage_formats.arrays import Bools, Ints, holes
from storage_formats.codecs import Blocks, Codec, Records, fill_record
from storage_formats.errors import CorruptIndexError
from storage_formats.format.checksum import crc32c_rows, read_checksums
from storage_formats.format.file_check import FileEntry
from storage_formats.format.index_files import IndexFile
from storage_formats.format.layout import checksum_file, token_file
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.offset import stored_codec
from storage_formats.writing.shard_writer import ShardWriter

EncodeAgain = Callable[[Ints], Mapping[int, Blocks]]
"""Function that takes positions in a shard, encodes the images of the rows at these
positions again, and returns a block [m, d] for each position.

Positions whose image cannot be encoded may be missing from the result. The result may
also have blocks of other positions.
"""


@dataclass(frozen=True)
class RepairedFile:
    """A file that was repaired.

    Attributes:
        path: path of the file, relative to the index.
        source: description of the data from which the file was restored, for example
            "precision bf16".
    """

    path: str
    source: str


@dataclass
class ShardRepair:
    """Repairs the token files and the checksum files of one shard.

    Attributes:
        index: the index, opened by a change.
        shard: number of the shard.
        files: entries of the files of the shard in the shard table, keyed by path. On
            an object store, they must have been downloaded.
        damaged: paths of the files that differ from their entries.
        encode_again: function that encodes images of the shard again.
        settled: paths of the token file and of the checksum file of each repaired
            precision. Both paths are in the set even if only one of the files was
            damaged.
    """

    index: CommittedIndex
    shard: int
    files: Mapping[str, FileEntry]
    damaged: set[str]
    encode_again: EncodeAgain
    settled: set[str] = field(default_factory=set)

    @functools.cached_property
    def _rows(self) -> int:
        return len(self.index.spec.shard_rows(self.shard))

    @functools.cached_property
    def _codecs(self) -> list[Codec]:
        codecs = []
        for name in self.index.spec.precisions:
            # If the offset block is damaged, precisions that need it can be neither
            # repaired nor converted to others.
            with contextlib.suppress(CorruptIndexError):
                codecs.append(stored_codec(self.index.place, self.index.spec, name))
        return codecs

    def run(self) -> Iterator[RepairedFile]:
        """Repair all files that can be repaired, and yield a `RepairedFile` for each of
        them.
        """
        for token_codec in self._codecs:
            damaged = self.damaged.intersection(self._paths(token_codec))
            if not damaged:
                continue
            for source, records in self._candidates(token_codec):
                if self._restore(token_codec, records, damaged):
                    self.settled.update(self._paths(token_codec))
                    yield from (RepairedFile(path, source) for path in sorted(damaged))
                    break

    def _paths(self, token_codec: Codec) -> tuple[str, str]:
        """Return the relative paths of the token file and of the checksum file of a
        precision.
        """
        tokens = token_file(token_codec.name, len(token_codec.record_shape))
        checksums = checksum_file(token_codec.name)
        return tokens.format(self.shard), checksums.format(self.shard)

    def _candidates(self, token_codec: Codec) -> Iterator[tuple[str, Records]]:
        """Yield candidates (description of the source, records) for the committed
        records of the shard.

        If the checksum file is undamaged, there is one candidate. It starts from the
        stored records. Each record that does not match its checksum is replaced by a
        record that does, from another precision or from the sources of the images, if
        there is one. If the checksum file is damaged, single records cannot be checked,
        so there is one candidate for each place from which all records can come.
        """
        stored = self._stored(token_codec)
        if self._paths(token_codec)[1] in self.damaged:
            yield "the tokens", stored
            yield from self._alternatives(
                token_codec, np.ones(self._rows, dtype=np.bool_)
            )
            return
        expected = read_checksums(
            self.index.layout, token_codec.name, self.shard, self._rows
        )
        is_damaged = crc32c_rows(stored) != expected
        origins = []
        for origin, records in self._alternatives(token_codec, is_damaged):
            replaced = is_damaged & (crc32c_rows(records) == expected)
            if replaced.any():
                stored[replaced] = records[replaced]
                # This array is changed in place, because `_alternatives` reads it
                # before it encodes images again: only the records that are still
                # damaged are encoded.
                is_damaged &= ~replaced
                origins.append(origin)
        yield ", ".join(origins) if origins else "the tokens", stored

    def _alternatives(
        self, token_codec: Codec, is_damaged: Bools
    ) -> Iterator[tuple[str, Records]]:
        """Yield (description of the origin, records) for each place from which lost
        records of a precision can come: first each other precision of the index, then
        the sources of the images.

        Args:
            is_damaged: bool [rows], which records are needed. The caller may change the
                array between two yielded items. Other records are not encoded from the
                sources.
        """
        for other in self._codecs:
            if other != token_codec:
                yield f"precision {other.name}", self._converted(other, token_codec)
        if is_damaged.any():
            records = np.repeat(fill_record(token_codec), self._rows, axis=0)
            blocks = self.encode_again(np.flatnonzero(is_damaged))
            for position, block in blocks.items():
                records[position] = token_codec.encode(block[None])
            yield "the sources", records

    def _stored(self, token_codec: Codec) -> Records:
        """Return the records in the token file, uint8 [rows, record_bytes]. If the file
        is too short or cannot be read, the missing bytes are 0.
        """
        records = np.zeros((self._rows, token_codec.record_bytes), dtype=np.uint8)
        path = self.index.root / self._paths(token_codec)[0]
        with contextlib.suppress(OSError), IndexFile(self.index.root, path) as file:
            data = np.frombuffer(file.read(records.nbytes), dtype=np.uint8)
            records.reshape(-1)[: len(data)] = data
        return records

    def _converted(self, source: Codec, target: Codec) -> Records:
        """Return the records that the token file of the precision `source` gives in the
        precision `target`, uint8 [rows, record_bytes]. Holes remain holes.
        """
        stored = self._stored(source)
        blocks = source.decode(stored)
        has_data = ~holes(blocks)
        records = np.repeat(fill_record(target), len(stored), axis=0)
        records[has_data] = target.encode(blocks[has_data])
        return records

    def _restore(self, token_codec: Codec, records: Records, damaged: set[str]) -> bool:
        """Write the token file and the checksum file that follow from `records`. If
        both equal the committed files, replace the `damaged` ones and return True.
        Otherwise change nothing and return False.
        """
        name = token_codec.name
        index = self.index
        with ShardWriter(index.place, index.spec, self.shard, [name]) as writer:
            present = np.flatnonzero(~holes(token_codec.decode(records)))
            writer.tokens[name].put(present, records[present])
            writer.stage_tokens()
            committed = [self.files.get(path) for path in self._paths(token_codec)]
            if [entry for _, entry in writer.staged] != committed:
                return False
            writer.staged = [each for each in writer.staged if each[1].path in damaged]
            writer.commit_files()
            return True
