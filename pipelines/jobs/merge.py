"""Merges: copy several indexes of the same model into a new index. No token is
decoded.
"""

from __future__ import annotations

import bisect
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import replace as replaced
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.ann import build_copied_ann
from pipelines.jobs.changing import ShardWork, finish_work, notifier, resumable
from pipelines.jobs.copy import CopyResult, CopyTask
from pipelines.jobs.plan import SOURCES_MEMBER, holds_clips, recorded_sources
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage, ignore, never
from storage_formats.change import begin_index, begin_new_index, now
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.offset import copy_offset
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import INDEXED, iter_rows
from storage_formats.format.source_columns import MAX_COLUMNS, merge_columns
from storage_formats.format.tombstones import Tombstones
from storage_formats.remote.urls import local_path
from storage_formats.writing.copying import ShardCopier
from storage_formats.writing.publish import new_manifest

# SHA-256, hexadecimal
_HASH = "S64"


@name_missing_extra("search")
def merge_indexes(
    indexes: Sequence[str | Path],
    out: str | Path,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> CopyResult:
    """Copy several indexes of the same model into a new index, as `edje-index merge`
    does. The model is not needed.

    The row ids of the first index stay the same, and those of each further index grow
    by a constant. If an earlier index has an image with the same content, the row is
    deleted. Call the function again to resume a stopped merge. The other arguments are
    those of `build_index`.

    Args:
        indexes: directories of the indexes, in the order of their rows.
        out: directory of the new index.

    Raises:
        UsageError: an index does not exist, the indexes differ in model, block shape,
            shard size, precisions or frames per clip, or `out` is not free.
        JobStopped: the merge stopped early, or a file is damaged. Finished shards are
            kept.
        EdjeError: another process is writing to `out`.
        MissingExtraError: FAISS is not installed, but an index has a nearest-neighbour
            index.

    Examples:
        >>> import shutil
        >>> from edje_index import merge_indexes
        >>> _ = shutil.copytree("photos.edje", "copy.edje")
        >>> merge_indexes(["photos.edje", "copy.edje"], "all.edje").duplicates
        6
    """
    started = time.monotonic()
    opened = [CommittedIndex.open(local_path(root)) for root in indexes]
    _refuse_different(opened)
    first = opened[0].manifest.spec
    segments = list[Segment]()
    offsets = list[int]()
    firsts = list[int]()
    for each in opened:
        used = each.manifest.spec.used_segments
        next_row = (
            -(-segments[-1].stop // first.shard_size) * first.shard_size
            if segments
            else 0
        )
        offsets.append(next_row - used[0].first_row)
        firsts.append(next_row // first.shard_size)
        segments += [
            Segment(segment.first_row + offsets[-1], segment.rows) for segment in used
        ]
    columns = tuple(
        sorted(
            merge_columns(*(each.manifest.columns for each in opened)),
            key=lambda each: each.name,
        )
    )
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the merged index would have {len(columns)} source columns; merge fewer"
            f" indexes, so that the index has at most {MAX_COLUMNS}"
        )
    spec = replaced(first, rows=segments[-1].stop, segments=tuple(segments))
    states = [
        {
            "root": str(each.root),
            "tables": [table.to_json() for table in each.manifest.shard_tables],
            "snapshot": asdict(each.manifest.snapshot),
        }
        for each in opened
    ]
    identity = {"kind": "merge", "indexes": states}
    manifests = [each.manifest for each in opened]
    root = local_path(out)
    with (
        begin_new_index(root, "merge", identity, notify=notifier(on_event)) as change,
        resumable(root),
    ):
        begin_index(root, spec)
        copy_offset(opened[0], change.layout)
        copiers = [
            ShardCopier(each, offset, change.layout)
            for each, offset in zip(opened, offsets, strict=True)
        ]

        def copy(task: CopyTask, _: object, should_stop: ShouldStop) -> ShardReceipt:
            position = bisect.bisect_right(firsts, task.shard) - 1
            moved = offsets[position] // spec.shard_size
            return copiers[position].copy_shard(task.shard - moved, task.plan)

        work = ShardWork(
            "copying",
            list(spec.shard_numbers()),
            spec.used_rows,
            identity,
            CopyTask,
            lambda: copy,
        )
        receipts = finish_work(change, work, on_event, should_stop)
        ann = build_copied_ann(change.layout.root, spec, manifests, on_event)
        on_event(StatusMessage("looking for duplicates"))
        # contents of the indexed rows of earlier indexes
        known: NDArray[np.bytes_] = np.empty(0, _HASH)
        # row ids, for each index
        duplicates: list[NDArray[np.int64]] = []
        for each in opened:
            found = [np.empty(0, np.int64)]
            hashes = [np.empty(0, _HASH)]
            for table in iter_rows(each, ["row_id", "content_hash", "status"]):
                digits = table["content_hash"].fill_null("").to_pylist()
                values = np.array([each.encode() for each in digits], _HASH)
                is_known = np.isin(values, known) & (values != b"")
                found.append(table["row_id"].to_numpy()[is_known])
                indexed = table["status"].to_numpy() == INDEXED
                hashes.append(values[(values != b"") & indexed])
            duplicates.append(np.concatenate(found))
            known = np.unique(np.concatenate([known, *hashes]))
        deleted = Tombstones.none(spec.shard_size)
        for each, rows, offset in zip(opened, duplicates, offsets, strict=True):
            deleted = deleted.with_rows(
                np.concatenate([each.deleted.row_ids(), rows]) + offset
            )
        encoded_from: dict[str, tuple[str, ...]] = {}
        for each_manifest in manifests:
            for name, chain in each_manifest.encoded_from.items():
                encoded_from[name] = max(encoded_from.get(name, ()), chain, key=len)
        settings = {
            name: value
            for name, value in manifests[0].settings.items()
            if name != SOURCES_MEMBER
        }
        digests = [manifest.settings.get("inputs_digest") for manifest in manifests]
        if None not in digests:
            settings["inputs_digest"] = hashlib.sha256(
                " ".join(map(str, digests)).encode()
            ).hexdigest()
        groups = [recorded_sources(manifest) for manifest in manifests]
        # the sources of all indexes are known
        if None not in groups:
            every = dict.fromkeys(
                group for of_input in groups for group in of_input or ()
            )
            settings[SOURCES_MEMBER] = [asdict(group) for group in every]
        inputs = [
            {
                "offset": offset,
                "rows": each.manifest.spec.used_rows,
                "duplicates": len(rows),
            }
            for each, rows, offset in zip(opened, duplicates, offsets, strict=True)
        ]
        merged = [
            {
                "name": each.root.name,
                "first_row": each.manifest.spec.used_segments[0].first_row
                + values["offset"],
                **values,
            }
            for each, values in zip(opened, inputs, strict=True)
        ]
        manifest = new_manifest(
            change.layout,
            spec,
            receipts,
            columns,
            model=manifests[0].model,
            settings=settings,
            plan=work.fingerprint,
            ann=ann,
            encoded_from=encoded_from,
            change={"kind": "merge", "created": now(), "inputs": merged},
            deleted=deleted,
        )
        change.commit(manifest)
    return CopyResult(
        rows=manifest.counts.inputs - manifest.snapshot.deleted_rows,
        shards=len(receipts),
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        duplicates=sum(map(len, duplicates)),
        inputs=[
            {"index": str(root), **values}
            for root, values in zip(indexes, inputs, strict=True)
        ],
    )


def _refuse_different(indexes: Sequence[CommittedIndex]) -> None:
    """Raise UsageError unless the indexes can be merged: at least two different
    ones, of one model and shape.
    """
    if len(indexes) < 2:
        raise UsageError("a merge needs at least two indexes", parameter="indexes")
    roots = [index.root.resolve() for index in indexes]
    for position, root in enumerate(roots):
        if root in roots[:position]:
            raise UsageError(
                f"{indexes[position].root} is given twice; give each index only once",
                parameter="indexes",
            )
    same_model = "only indexes of the same model can be merged"

    def properties(index: CommittedIndex) -> list[tuple[str, str, str]]:
        """Return (name, value, advice) of what must be equal."""
        spec = index.manifest.spec
        manifest = index.manifest
        shape = " x ".join(map(str, spec.block_shape))
        frames = (
            str(manifest.settings["frames"]) if holds_clips(manifest) else "images only"
        )
        precisions = ", ".join(sorted(spec.precisions))
        offset = "none"
        if spec.offset is not None:
            names = ", ".join(sorted(spec.offset.precisions))
            offset = f"{spec.offset.crc32c:08x} of {names}"
        return [
            ("encoder fingerprint", str(manifest.model["fingerprint"]), same_model),
            ("block shape", shape, same_model),
            ("width of embeddings", str(spec.embed_dim), same_model),
            (
                "rows per shard",
                str(spec.shard_size),
                "build one of them again with the shard size of the other",
            ),
            (
                "precisions",
                precisions,
                "add or drop precisions with 'edje-index quantize' first",
            ),
            (
                "offset block",
                offset,
                "drop the precisions with an offset with 'edje-index quantize' first,"
                " and add them to the merged index",
            ),
            (
                "frames per clip",
                frames,
                "build them with the same number of frames, or keep them apart",
            ),
        ]

    for other in indexes[1:]:
        for (name, left, advice), (_, right, _) in zip(
            properties(indexes[0]), properties(other), strict=True
        ):
            if left != right:
                raise UsageError(
                    f"{indexes[0].root} and {other.root} cannot be merged: the {name}"
                    f" is {left} in {indexes[0].root} and {right} in {other.root};"
                    f" {advice}",
                    parameter="indexes",
                )
