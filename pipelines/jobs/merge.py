"""Merges: copy several indexes of the same model into a new index. No token is
decoded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.jobs.changing import NewContents, ShardWork, apply, begin_new
from pipelines.jobs.copy import CopyResult, CopyTask
from pipelines.jobs.plan import holds_clips, recorded_sources, with_sources
from pipelines.progress.events import OnEvent, ShouldStop, StatusMessage, ignore, never
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import Layout, Segment
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.receipts import ShardReceipt
from storage_formats.format.rows import INDEXED, iter_rows
from storage_formats.format.source_columns import MAX_COLUMNS, merge_columns
from storage_formats.format.tombstones import Tombstones
from storage_formats.remote.urls import local_path
from storage_formats.writing.copying import ShardCopier

# SHA-256, hexadecimal
_HASH = "S64"
# of what `index.json` records of an index, what the result of a merge has too
_SHOWN = ("offset", "rows", "duplicates")


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
    opened = [CommittedIndex.open(local_path(each)) for each in indexes]
    _refuse_different(opened)
    root = local_path(out)
    states = [
        {
            "root": str(each.root),
            "tables": [table.to_json() for table in each.manifest.shard_tables],
            "snapshot": asdict(each.manifest.snapshot),
        }
        for each in opened
    ]
    identity = {"kind": "merge", "indexes": states}
    with begin_new(root, "merge", identity, on_event) as change:
        copy = merging(opened, change.layout, identity, on_event)
        applied = apply(change, copy, on_event, should_stop)
    manifest = applied.manifest
    inputs = [
        {"index": str(each), **{name: values[name] for name in _SHOWN}}
        for each, values in zip(indexes, copy.details["inputs"], strict=True)
    ]
    return CopyResult(
        rows=manifest.counts.inputs - manifest.snapshot.deleted_rows,
        shards=len(applied.receipts),
        snapshot=manifest.snapshot.number,
        seconds=time.monotonic() - started,
        duplicates=sum(each["duplicates"] for each in inputs),
        inputs=inputs,
    )


def merging(
    indexes: Sequence[CommittedIndex],
    target: Layout,
    identity: Mapping[str, Any],
    on_event: OnEvent,
) -> NewContents:
    """Return the contents of an index with all rows of `indexes`. See `merge_indexes`.

    Raises:
        UsageError: the new index would have too many columns.
    """
    manifests = [each.manifest for each in indexes]
    first = manifests[0].spec
    size = first.shard_size
    segments = list[Segment]()
    # (copier, shard to copy) by shard of the new index
    origins: dict[int, tuple[ShardCopier, int]] = {}
    inputs = list[dict[str, Any]]()
    deleted = Tombstones.none(size)
    # contents of the indexed rows of earlier indexes
    known: NDArray[np.bytes_] = np.empty(0, _HASH)
    on_event(StatusMessage("looking for duplicates"))
    for each in indexes:
        spec = each.manifest.spec
        old_first = spec.used_segments[0].first_row
        new_first = -(-segments[-1].stop // size) * size if segments else 0
        offset = new_first - old_first
        segments += [
            Segment(segment.first_row + offset, segment.rows)
            for segment in spec.used_segments
        ]
        copier = ShardCopier(each, offset, target)
        for shard in spec.shard_numbers():
            origins[shard + offset // size] = (copier, shard)
        repeated = [np.empty(0, np.int64)]
        contents = [known]
        for table in iter_rows(each, ["row_id", "content_hash", "status"]):
            digits = table["content_hash"].fill_null("").to_pylist()
            hashes = np.array(digits, _HASH)
            is_known = np.isin(hashes, known) & (hashes != b"")
            repeated.append(table["row_id"].to_numpy()[is_known])
            contents.append(hashes[table["status"].to_numpy() == INDEXED])
        known = np.unique(np.concatenate(contents))
        rows = np.concatenate(repeated)
        gone = np.concatenate([each.deleted.row_ids(), rows])
        deleted = deleted.with_rows(gone + offset)
        inputs.append(
            {
                "name": each.root.name,
                "first_row": new_first,
                "offset": offset,
                "rows": spec.used_rows,
                "duplicates": len(rows),
            }
        )
    columns = merge_columns(*(manifest.columns for manifest in manifests))
    if len(columns) > MAX_COLUMNS:
        raise UsageError(
            f"the merged index would have {len(columns)} source columns; merge fewer"
            f" indexes, so that the index has at most {MAX_COLUMNS}"
        )
    groups = [recorded_sources(manifest) for manifest in manifests]
    every = None
    if None not in groups:
        # each once
        every = dict.fromkeys(group for of_index in groups for group in of_index or ())
    settings = with_sources(manifests[0], every)
    digests = [manifest.settings.get("inputs_digest") for manifest in manifests]
    if None not in digests:
        text = " ".join(map(str, digests))
        settings["inputs_digest"] = hashlib.sha256(text.encode()).hexdigest()

    def copy(task: CopyTask, _: object, should_stop: ShouldStop) -> ShardReceipt:
        copier, shard = origins[task.shard]
        return copier.copy_shard(shard, task.plan)

    spec = replace(first, rows=segments[-1].stop, segments=tuple(segments))
    return NewContents(
        spec,
        ShardWork(
            "copying",
            list(origins),
            spec.used_rows,
            identity,
            CopyTask,
            lambda: copy,
        ),
        manifests[0].model,
        settings,
        tuple(sorted(columns, key=lambda column: column.name)),
        origins=indexes,
        details={"kind": "merge", "inputs": inputs},
        deleted=deleted,
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
                "add or drop precisions first",
            ),
            (
                "offset block",
                offset,
                "drop the precisions with an offset first, and add them to the merged"
                " index",
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
