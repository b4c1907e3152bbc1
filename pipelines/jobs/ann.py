"""The job that builds the nearest-neighbour index of a finished index again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.environment import free_disk
from pipelines.jobs.resources import usable_memory
from pipelines.progress.events import OnEvent, Progress, ShouldStop, progress_callback, stop_at_events
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from storage_formats.format.object_store import IndexLocation
    from storage_formats.writing.working_copy import WorkingCopy

_SHARDS_PER_DOWNLOAD = 64
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
        location: directory or URL of the index. The embeddings of an index at a URL are downloaded first.
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
    from storage_formats.writing.working_copy import working_copy

    on_event = stop_at_events(on_event, should_stop, _STOPPED)
    with working_copy(location) as copy:
        with begin_change(copy.root, "ann build") as change:
            download_embeddings(copy, on_event)
            request = AnnRequest(ann, recall, usable_memory(memory))
            manifest = replace_ann(change, request, progress_callback(on_event))
        copy.remove_unnamed_objects()
    return manifest.ann


def download_embeddings(copy: WorkingCopy, on_event: OnEvent) -> None:
    """Download the embeddings of an index on an object store to its working copy.

    Raises:
        UsageError: the disk has no room for the embeddings.
    """
    from storage_formats.format.index_files import download_missing
    from storage_formats.format.layout import Layout
    from storage_formats.format.manifest import CommittedIndex

    if copy.remote is None:
        return
    spec, layout = CommittedIndex.open(copy.root).manifest.spec, Layout(copy.root)
    shards = [shard for shard in spec.shard_numbers() if not layout.embedding_shard(shard).exists()]
    need, free = len(shards) * spec.shard_size * spec.embed_dim * 4, free_disk(copy.root)
    if need > free:
        raise UsageError(
            f"the embeddings of {copy.remote.url} need {need} bytes of disk, but only {free} are free at "
            f"{copy.root}; free some space, or set EDJE_CACHE to a directory on a larger disk"
        )
    for first in range(0, len(shards), _SHARDS_PER_DOWNLOAD):
        on_event(Progress("downloading", first, len(shards)))
        part = shards[first : first + _SHARDS_PER_DOWNLOAD]
        download_missing(copy.root, [layout.embedding_shard(shard) for shard in part])
