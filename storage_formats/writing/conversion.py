"""Conversion of an index to other precisions, shard by shard and without the model (SPEC.md section 11).

The source blocks of an index on an object store are read by range requests. They are not stored on this machine.

Readers can use the index during the conversion. They see a new precision after `index.json` lists it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import numpy as np

from storage_formats.atomic import fsync_paths, write_json_atomic
from storage_formats.codecs import BF16, Blocks, Codec, Records, codec
from storage_formats.codecs.bf16 import BF16Codec
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.format.checksum import crc32c_rows, read_checksums
from storage_formats.format.index_files import check_inside, open_regular
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import downloading
from storage_formats.format.object_store import ObjectFolder
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.shard_table import FileEntry, read_shard_tables, write_shard_table
from storage_formats.format.zarr_metadata import token_array_metadata
from storage_formats.reading.batch import Batch
from storage_formats.reading.checksums import BlockCheck
from storage_formats.reading.destination import Destination
from storage_formats.reading.memory import BufferPool
from storage_formats.reading.object_reads import ObjectReads
from storage_formats.writing.begin import remove_unfinished
from storage_formats.writing.publish import check_receipts, remove_build
from storage_formats.writing.shard_writer import open_tokens, stage_tokens
from storage_formats.writing.snapshots import kept_snapshots, remove_unnamed_files
from storage_formats.writing.staging import StagedFiles
from storage_formats.writing.token_shard import TokenShardFile

_PIECE_BYTES = 8 << 20
_REMOTE_PIECE_BYTES = 32 << 20  # of bf16 blocks; several requests of this length are in flight
_HINT_BYTES = 1 << 20  # the kernel may ignore all but the start of a longer hint
Piece: TypeAlias = tuple[int, Blocks]


class ConversionInterrupted(EdjeError):
    """The caller stopped the conversion of a shard. The unfinished files of this shard were removed."""


@dataclass(frozen=True)
class ConversionTask:
    """The conversion of one shard.

    Attributes:
        root: directory of the index.
        shard: shard number.
        spec: shape of the index.
        source: precision to read, one of the precisions of the index.
        targets: precisions to write.
        plan: fingerprint of the plan of the whole conversion.
        url: URL of the index whose working copy is at `root`; None if the index itself is at `root`.
    """

    root: str
    shard: int
    spec: IndexSpec
    source: str
    targets: tuple[str, ...]
    plan: str
    url: str | None = None


def convert_shard(
    task: ConversionTask,
    on_progress: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ShardReceipt:
    """Convert one shard, commit the new files, and return the receipt.

    Args:
        task: the conversion.
        on_progress: called after each piece with the number of rows converted so far.
        should_stop: called between pieces; True stops the conversion.

    Raises:
        CorruptIndexError: a block does not match its checksum, or a file cannot be read.
        ObjectStoreError: the object store refused a request or cannot be reached.
        ConversionInterrupted: `should_stop` returned True.
        OSError: a file cannot be written.
    """
    layout = Layout(Path(task.root))
    staged = StagedFiles(layout, task.shard)
    with contextlib.ExitStack() as stack:
        stack.callback(staged.remove)
        if task.url is not None:
            stack.enter_context(downloading(layout.root, task.url))
        files: dict[str, TokenShardFile] = {}
        for name in task.targets:
            files[name] = open_tokens(staged, task.spec, task.shard, name)
            stack.callback(files[name].close)
        holes = done = 0
        for first, blocks in stack.enter_context(contextlib.closing(_read_ahead(_checked_blocks(task, layout)))):
            if should_stop():
                raise ConversionInterrupted(
                    f"the conversion stopped at shard {task.shard}; run the same command again to resume"
                )
            kept = np.flatnonzero(~np.isnan(blocks[:, 0, 0].astype(np.float32)))
            for file in files.values():
                file.put(kept + first, file.codec.encode(blocks if len(kept) == len(blocks) else blocks[kept]))
            done, holes = first + len(blocks), holes + len(blocks) - len(kept)
            on_progress(done)
        for name, file in files.items():
            stage_tokens(staged, layout, task.shard, name, file)
        committed = staged.commit()
        failed = {"hole": holes} if holes else {}
        receipt = ShardReceipt(task.shard, task.plan, done, done - holes, 0, failed, committed, {})
        staged.commit_receipt(receipt)
    return receipt


def _read_ahead(pieces: Iterator[Piece]) -> Generator[Piece]:
    """Yield the items of `pieces`. A thread computes the next piece while the caller processes the current piece."""
    with ThreadPoolExecutor(1, "edje-read") as thread:
        next_piece = thread.submit(next, pieces, None)
        while (piece := next_piece.result()) is not None:
            next_piece = thread.submit(next, pieces, None)
            yield piece


def _checked_blocks(task: ConversionTask, layout: Layout) -> Iterator[Piece]:
    """Yield (first position, blocks). Only the last two yielded pieces are valid."""
    # Two buffers take turns, because new memory would cost a page fault per 4 KiB.
    source_codec = codec(task.source, task.spec.block_shape)
    step = max(1, _PIECE_BYTES // source_codec.record_bytes)
    if task.url is not None:
        step = max(1, _REMOTE_PIECE_BYTES // codec(BF16Codec.name, task.spec.block_shape).record_bytes)
    buffers = [np.empty((step, *task.spec.block_shape), dtype=BF16) for _ in range(2)]
    for first, records in _checked_records(task, layout, source_codec, step):
        if source_codec.name == BF16Codec.name:
            yield first, records.view(BF16).reshape(len(records), *task.spec.block_shape)
        else:
            buffers.reverse()
            yield first, source_codec.decode(records, buffers[0][: len(records)])


def _checked_records(
    task: ConversionTask, layout: Layout, source_codec: Codec, step: int
) -> Iterator[tuple[int, Records]]:
    """Yield (first position, records). Only the last two yielded pieces are valid."""
    rows = task.spec.shard_rows(task.shard)
    path = layout.token_shard(task.source, task.shard, len(source_codec.record_shape))
    read = _read_file if task.url is None else _read_object
    try:
        checksums = read_checksums(layout, task.source, task.shard, len(rows))
        for first, records in read(task, path, source_codec, step):
            for position in np.flatnonzero(crc32c_rows(records) != checksums[first : first + len(records)]):
                row = rows.start + first + position
                raise CorruptIndexError(f"the block of row {row} in {path} is damaged; run 'edje-index verify'")
            yield first, records
    except OSError as error:
        raise CorruptIndexError(
            f"cannot read shard {task.shard} of precision '{task.source}': {error}; run 'edje-index verify'"
        ) from error


def _read_file(task: ConversionTask, path: Path, source_codec: Codec, step: int) -> Iterator[tuple[int, Records]]:
    """Yield (first position, records) of the token file at `path`. Only the last two yielded pieces are valid."""
    rows, size = len(task.spec.shard_rows(task.shard)), source_codec.record_bytes
    with os.fdopen(open_regular(check_inside(task.root, path)), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < rows * size:  # before memory is allocated
            raise CorruptIndexError(f"{path} ends before the last record; run 'edje-index verify'")
        buffers = [np.empty((min(step, rows), size), dtype=np.uint8) for _ in range(2)]
        for first in range(0, rows, step):
            buffers.reverse()
            records = buffers[0][: rows - first]
            if not _fill(file, records):
                raise CorruptIndexError(f"{path} ends before the last record; run 'edje-index verify'")
            yield first, records
    _announce_next(task, Layout(Path(task.root)), source_codec)


def _read_object(task: ConversionTask, path: Path, source_codec: Codec, step: int) -> Iterator[tuple[int, Records]]:
    """Yield (first position, records) of the token object of the path `path`, like `_read_file`."""
    assert task.url is not None
    rows, size, layout = task.spec.shard_rows(task.shard), source_codec.record_bytes, Layout(Path(task.root))
    reads = ObjectReads(ObjectFolder.open(task.url), lambda _: layout.relative(path), size, None, BufferPool())
    reads.check_length(task.spec, task.shard)  # before memory is allocated
    checksums = read_checksums(layout, task.source, task.shard, len(rows))
    stored = BlockCheck(checksums, np.arange(rows.start, rows.stop), lambda _: reads.url(task.shard))
    buffers = [np.empty((min(step, len(rows)), size), dtype=np.uint8) for _ in range(2)]
    for first in range(0, len(rows), step):
        buffers.reverse()
        records = buffers[0][: len(rows) - first]
        positions = np.arange(first, first + len(records))
        batch = Batch(np.full(len(records), task.shard), positions, positions - first)
        reads.read_into(Destination(batch, records, source_codec, lambda part: stored[part.positions]))
        yield first, records


def _announce_next(task: ConversionTask, layout: Layout, source_codec: Codec) -> None:
    """Ask the kernel to read the next source shard into the page cache while this shard is flushed."""
    path = layout.token_shard(task.source, task.shard + 1, len(source_codec.record_shape))
    if hasattr(os, "posix_fadvise") and path.exists():
        with open(path, "rb", buffering=0) as file:
            for offset in range(0, 2 * _PIECE_BYTES, _HINT_BYTES):
                os.posix_fadvise(file.fileno(), offset, _HINT_BYTES, os.POSIX_FADV_WILLNEED)


def _fill(file: FileIO, records: Records) -> bool:
    """Fill `records` with the next bytes of `file`. Return False if the file ends before `records` is full."""
    target, done = records.data.cast("B"), 0
    while count := file.readinto(target[done:]):
        done += count
    return done == len(target)


def add_precisions(
    root: str | Path, targets: Sequence[str], receipts: Sequence[ShardReceipt], *, source: str
) -> Manifest:
    """Commit converted precisions: write the `zarr.json` files, the shard tables, and finally `index.json`.

    Args:
        root: directory of the index.
        targets: converted precisions, which are not in `index.json` yet.
        receipts: one receipt per shard.
        source: precision from which the targets were converted.

    Raises:
        CorruptIndexError: a shard has no receipt.
    """
    layout = Layout(Path(root))
    manifest = Manifest.load(root)
    check_receipts(receipts, list(manifest.spec.shard_numbers()))
    spec = replace(manifest.spec, precisions=(*manifest.spec.precisions, *targets))
    for name in targets:
        write_json_atomic(layout.token_array(name) / "zarr.json", token_array_metadata(spec, name))
    fsync_paths([layout.tokens, layout.root / "checksums"])
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    sources = (*manifest.encoded_from.get(source, ()), source)
    marked = replace(manifest, encoded_from={**manifest.encoded_from, **dict.fromkeys(targets, sources)})
    return _replace_manifest(layout, marked, spec, [*read_shard_tables(root, manifest.shard_tables), *files])


def drop_precision(root: str | Path, name: str) -> Manifest:
    """Remove a precision from `index.json` and the shard tables. `remove_leftovers` removes the files of the precision.

    Raises:
        UsageError: the index does not have the precision, or has no other precision.
    """
    layout = Layout(Path(root))
    manifest = Manifest.load(root)
    if name not in manifest.spec.precisions:
        raise UsageError(
            f"the index at {root} does not have precision '{name}'; "
            f"choose one of: {', '.join(manifest.spec.precisions)}"
        )
    if len(manifest.spec.precisions) == 1:
        raise UsageError(f"'{name}' is the only precision of {root}; add another precision before you drop '{name}'")
    spec = replace(manifest.spec, precisions=tuple(held for held in manifest.spec.precisions if held != name))
    folders = [layout.token_array(name), layout.checksums(name, 0).parent]
    dropped = tuple(f"{layout.relative(folder)}/" for folder in folders)
    lines = read_shard_tables(root, manifest.shard_tables)
    kept = [(shard, file) for shard, file in lines if not file.path.startswith(dropped)]
    origins = {held: sources for held, sources in manifest.encoded_from.items() if held != name}
    return _replace_manifest(layout, replace(manifest, encoded_from=origins), spec, kept)


def remove_leftovers(root: str | Path) -> None:
    """Delete `build/` and the files of dropped precisions and unfinished conversions.

    The caller must hold the lock of the index. An unfinished conversion cannot be resumed afterwards. Earlier shard
    tables are kept, because readers that are already open need them.
    """
    index = CommittedIndex.open(root)
    layout = Layout(index.root)
    remove_unfinished(layout)
    remove_build(layout)
    remove_unnamed_files(layout, kept_snapshots(index))


def _replace_manifest(
    layout: Layout, manifest: Manifest, spec: IndexSpec, files: Sequence[tuple[int, FileEntry]]
) -> Manifest:
    """Write `files` as shard tables, then commit `manifest` with the same snapshot number."""
    tables = []
    for segment in spec.used_segments:
        shards = spec.segment_shards(segment)
        tables.append(write_shard_table(layout, [(shard, file) for shard, file in files if shard in shards]))
    changed = replace(manifest, spec=spec, shard_table=tables[0], further_tables=tuple(tables[1:]))
    changed.write(layout)
    return changed
