"""Further precisions of an index that is finished: a shard at a time, without the model (SPEC.md section 11).

The index stays readable throughout. Shards of a new precision are committed like those of a build, with receipts in
`build/`; the precision exists once `index.json` names it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from storage_formats.atomic import fsync_paths, write_json_atomic
from storage_formats.checksum import crc32c_rows
from storage_formats.codecs import Records, codec
from storage_formats.errors import CorruptIndexError, EdjeError, UsageError
from storage_formats.layout import IndexSpec, Layout
from storage_formats.manifest import FileRecord, Manifest, write_shard_table
from storage_formats.receipts import ShardReceipt
from storage_formats.shard_writer import open_tokens, stage_tokens
from storage_formats.staging import StagedFiles
from storage_formats.token_shard import TokenShardFile
from storage_formats.zarr_meta import token_array_metadata

_PIECE_BYTES = 8 << 20


class ConversionInterrupted(EdjeError):
    """The caller asked to stop; the attempt was removed."""


@dataclass(frozen=True)
class ConversionTask:
    """One shard to convert.

    Attributes:
        root: the index.
        shard: its number.
        spec: shape of the index.
        source: precision to read, one that the index holds.
        targets: precisions to write.
        plan: fingerprint of the conversion.
    """

    root: str
    shard: int
    spec: IndexSpec
    source: str
    targets: tuple[str, ...]
    plan: str


def convert_shard(
    task: ConversionTask,
    on_progress: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ShardReceipt:
    """Read a shard once, check every block, encode it to each target and commit the new files.

    Args:
        task: what to convert.
        on_progress: called with the number of rows done.
        should_stop: asked between pieces.

    Raises:
        CorruptIndexError: a block of the source does not match its checksum; damage is never copied.
        ConversionInterrupted: `should_stop` said so.
        OSError: the index cannot be written.
    """
    layout = Layout(Path(task.root))
    staged = StagedFiles(layout, task.shard)
    with contextlib.ExitStack() as stack:
        stack.callback(staged.remove)
        files: dict[str, TokenShardFile] = {}
        for name in task.targets:
            files[name] = open_tokens(staged, task.spec, task.shard, name)
            stack.callback(files[name].close)
        source = codec(task.source, task.spec.block_shape)
        holes = done = 0
        for first, records in _checked_records(task, layout):
            if should_stop():
                raise ConversionInterrupted(f"stopped inside shard {task.shard}")
            blocks = source.decode(records)
            kept = np.flatnonzero(~np.isnan(blocks[:, 0, 0].astype(np.float32)))
            for file in files.values():
                file.put(kept + first, file.codec.encode(blocks if len(kept) == len(blocks) else blocks[kept]))
            done, holes = first + len(records), holes + len(records) - len(kept)
            on_progress(done)
        for name, file in files.items():
            stage_tokens(staged, layout, task.shard, name, file)
        committed = staged.commit()
    failed = {"hole": holes} if holes else {}
    receipt = ShardReceipt(task.shard, task.plan, done, done - holes, 0, failed, committed, {})
    receipt.write(layout)
    return receipt


def _checked_records(task: ConversionTask, layout: Layout) -> Iterator[tuple[int, Records]]:
    """(position, records) of pieces of the source shard in order, each block checked against its CRC-32C."""
    entry = codec(task.source, task.spec.block_shape)
    rows = len(task.spec.shard_rows(task.shard))
    path = layout.token_shard(task.source, task.shard, len(entry.record_shape))
    step = max(1, _PIECE_BYTES // entry.record_bytes)
    try:
        sums = np.fromfile(layout.checksums(task.source, task.shard), dtype="<u4")
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # the whole shard in flight while the first piece is encoded
                os.posix_fadvise(file.fileno(), 0, rows * entry.record_bytes, os.POSIX_FADV_WILLNEED)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                data = np.fromfile(file, dtype=np.uint8, count=count * entry.record_bytes)
                if data.size != count * entry.record_bytes or sums.size != rows:
                    raise CorruptIndexError(f"{path} or its checksums end early; run 'edje-index verify'")
                records = data.reshape(count, entry.record_bytes)
                for position in np.flatnonzero(crc32c_rows(records) != sums[first : first + count]):
                    row = task.spec.shard_rows(task.shard).start + first + position
                    raise CorruptIndexError(f"the block of row {row} in {path} is damaged; run 'edje-index verify'")
                yield first, records
    except OSError as error:
        raise CorruptIndexError(f"cannot read shard {task.shard} of '{task.source}': {error}") from error


def add_precisions(root: str | Path, targets: Sequence[str], receipts: Sequence[ShardReceipt]) -> Manifest:
    """Make converted precisions part of the index: metadata, shard table, and last `index.json`; remove `build/`.

    Args:
        root: the index.
        targets: precisions that `receipts` hold, none of them part of the index yet.
        receipts: one for each shard.
    """
    layout = Layout(Path(root))
    manifest = Manifest.load(root)
    found = sorted(receipt.shard for receipt in receipts)
    if found != list(range(manifest.spec.shards)):
        raise CorruptIndexError(f"{manifest.spec.shards} shards are planned, receipts exist for {len(set(found))}")
    spec = replace(manifest.spec, precisions=(*manifest.spec.precisions, *targets))
    for name in targets:
        write_json_atomic(layout.token_array(name) / "zarr.json", token_array_metadata(spec, name))
    fsync_paths([layout.tokens, layout.root / "checksums"])
    files = [(receipt.shard, file) for receipt in receipts for file in receipt.files]
    changed = _replace_manifest(layout, manifest, spec, [*_table(manifest, root), *files])
    shutil.rmtree(layout.build, ignore_errors=True)
    return changed


def drop_precision(root: str | Path, name: str) -> Manifest:
    """Take a precision out of the index and delete its files.

    Raises:
        UsageError: the index does not hold it, or holds no other.
    """
    layout = Layout(Path(root))
    manifest = Manifest.load(root)
    if name not in manifest.spec.precisions:
        raise UsageError(f"{root} does not hold '{name}'; it holds: {', '.join(manifest.spec.precisions)}")
    if len(manifest.spec.precisions) == 1:
        raise UsageError(f"'{name}' is the only precision of {root}; its tokens would be lost")
    spec = replace(manifest.spec, precisions=tuple(held for held in manifest.spec.precisions if held != name))
    folders = [layout.token_array(name), layout.checksums(name, 0).parent]
    gone = tuple(f"{layout.relative(folder)}/" for folder in folders)
    kept = [(shard, file) for shard, file in _table(manifest, root) if not file.path.startswith(gone)]
    changed = _replace_manifest(layout, manifest, spec, kept)
    for folder in folders:
        shutil.rmtree(folder)
    return changed


def _table(manifest: Manifest, root: str | Path) -> list[tuple[int, FileRecord]]:
    lines = manifest.shard_files(root).to_pylist()
    return [(line["shard"], FileRecord(line["path"], line["bytes"], line["crc32c"])) for line in lines]


def _replace_manifest(
    layout: Layout, manifest: Manifest, spec: IndexSpec, files: Sequence[tuple[int, FileRecord]]
) -> Manifest:
    """Commit another set of precisions; the shard table that is no longer named is removed."""
    table = write_shard_table(layout, files)
    changed = replace(manifest, spec=spec, shard_table=table)
    changed.write(layout)
    if table.path != manifest.shard_table.path:
        (layout.root / manifest.shard_table.path).unlink(missing_ok=True)
    return changed
