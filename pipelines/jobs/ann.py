"""The job that builds the nearest-neighbour index of a finished index again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.jobs.resources import usable_memory
from pipelines.progress.events import OnEvent, ShouldStop, progress_callback, stop_at_events

if TYPE_CHECKING:
    from storage_formats.format.object_store import IndexLocation

_STOPPED = "stopped; the index was not changed"


def run_ann_build(
    location: IndexLocation,
    ann: str,
    recall: float,
    on_event: OnEvent,
    should_stop: ShouldStop = lambda: False,
    *,
    memory: int | None = None,
) -> dict[str, Any]:
    """Build the nearest-neighbour index of the index at `location`, and replace the existing one.

    Return its description, as stored in `ann` of `index.json`.

    Args:
        location: directory of the index.
        ann: "auto" or a FAISS factory string; see `AnnRequest`.
        recall: target share of the 100 nearest rows that a search finds, between 0 and 1.
        on_event: called with each progress event.
        should_stop: called after each progress event.
        memory: memory in bytes that the build may need; None is the free memory.

    Raises:
        JobStopped: `should_stop()` returned True. The index was not changed.
        UsageError: there is no index at `location`, `ann` or `recall` is invalid, or the disk or the memory is too
            small.
        CorruptIndexError: the index is damaged.
        EdjeError: another process is changing the index.
        OSError: a file cannot be written.
    """
    from edje_index.indexing.faiss_index import AnnRequest, replace_ann
    from storage_formats.change import begin_change

    on_event = stop_at_events(on_event, should_stop, _STOPPED)
    with begin_change(location, "ann build") as change:
        request = AnnRequest(ann, recall, usable_memory(memory))
        return replace_ann(change, request, progress_callback(on_event)).ann
