"""Prepares an append: lists the new inputs of the sources, and plans their rows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pipelines.planning.config import AppendConfig
from pipelines.planning.new_rows import (
    NewInputs,
    PreparedRows,
    RowsRequest,
    refuse_change_of_another_kind,
    request_rows,
)
from pipelines.planning.plan import BuildPlan, discard_change, read_plan
from pipelines.planning.recorded_sources import holds_clips
from pipelines.progress.events import OnEvent, ShouldStop
from storage_formats.errors import EdjeError

if TYPE_CHECKING:
    from edje_index.images.inputs import InputRef
    from storage_formats.format.manifest import CommittedIndex


def prepare_append(
    config: AppendConfig, index: CommittedIndex, on_event: OnEvent, should_stop: ShouldStop
) -> PreparedRows:
    """Read the plan of a stopped append to `index`. If there is no plan, make a plan and store it in `build/`.

    The caller must hold the lock of the index.

    Raises:
        UsageError: a source cannot be used, the machine lacks the device, memory or disk space, or the index was not
            made by a build.
        ModelError: the model bundle cannot be used, or another bundle built the index.
        EdjeError: another change has not finished, or the index has changed since the append was stopped.
        CorruptIndexError: the index or the plan is damaged.
        JobStopped: `should_stop()` returned True.
    """
    request = request_rows(config, index, "append")
    stored = read_plan(config.root, append=True)
    if stored is not None:
        refuse_other_append(stored, request)
        return request.resumed(stored)
    return request.prepared(new_inputs(config, index, on_event, should_stop))


def refuse_other_append(stored: BuildPlan, request: RowsRequest) -> None:
    """Raise EdjeError unless `stored` is a plan for the same append to the current rows of the index."""
    refuse_change_of_another_kind(stored, request.change)
    if stored.settings != request.settings:
        raise EdjeError(
            f"an append of {', '.join(stored.settings.sources)} to {stored.root} has not finished; run "
            f"the same append again, or {discard_change(stored.root)}"
        )
    if not request.fits(stored):
        raise EdjeError(
            f"{stored.root} has changed since an append of {', '.join(stored.settings.sources)} stopped; "
            f"{discard_change(stored.root)}, and append again"
        )


def new_inputs(config: AppendConfig, index: CommittedIndex, on_event: OnEvent, should_stop: ShouldStop) -> NewInputs:
    """List the inputs of the sources that `index` does not contain.

    Raises:
        UsageError: a source cannot be used.
        TransientInputError: an input cannot be read for a temporary reason.
        JobStopped: `should_stop()` returned True.
    """
    from pipelines.sources import count_ignored, digested, iter_all, mark_duplicates, open_sources

    sources = open_sources(config.sources, config.column, clips=holds_clips(index.manifest))
    digest = hashlib.sha256()
    listed = list(mark_duplicates(digested(iter_all(sources), digest, on_event, should_stop)))
    refs = _without_known(index, [ref for ref in listed if ref.duplicate_of is None])
    return NewInputs(refs, digest.hexdigest(), len(listed) - len(refs), count_ignored(sources))


def _without_known(index: CommittedIndex, refs: list[InputRef]) -> list[InputRef]:
    """Return the inputs of `refs` that `index` does not contain yet."""
    from storage_formats.format.rows import iter_rows

    hashes = {ref.content_hash for ref in refs if ref.content_hash is not None}
    known: set[str] = set()
    for table in iter_rows(index, ["content_hash"]):
        known |= hashes.intersection(table["content_hash"].to_pylist())
    return [ref for ref in refs if ref.content_hash not in known]
