"""The job of `edje-index ann build`, and the build of a nearest-neighbour index by
other jobs.
"""

from __future__ import annotations

from edje_index.indexing.faiss_build import AnnRequest, build_ann
from pipelines.jobs.changing import Edit, apply, begin
from pipelines.progress.events import (
    OnEvent,
    ShouldStop,
    StatusMessage,
    ignore,
    never,
    progress_callback,
)
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Ann, Manifest
from storage_formats.format.places import Place
from storage_formats.remote.urls import IndexLocation

_DEFAULT = AnnRequest()


def add_ann(
    root: IndexLocation,
    request: AnnRequest = _DEFAULT,
    *,
    on_event: OnEvent = ignore,
    should_stop: ShouldStop = never,
) -> Manifest:
    """Build the nearest-neighbour index of the finished index at `root`, and commit the
    result. Return the new manifest.

    Args:
        root: directory or URL of the index.
        request: kind and recall of the nearest-neighbour index. The default is the kind
            that suits the number of rows.
        on_event: as in `build_index`.
        should_stop: as in `build_index`.

    Examples:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
        UsageError: `request` is invalid.
        JobStopped: `should_stop()` returned True. The index has not changed.
        MissingExtraError: FAISS is not installed.
    """
    with name_missing_extra("search"), begin(root, "ann build") as change:
        edit = Edit(change.index.spec, ann=request)
        return apply(change, edit, on_event, should_stop).manifest


def new_ann(
    place: Place,
    spec: IndexSpec,
    request: AnnRequest,
    on_event: OnEvent,
) -> Ann:
    """Build a nearest-neighbour index, see `build_ann`. Return its description for the
    manifest.
    """
    on_event(StatusMessage("building the nearest-neighbour index"))
    return build_ann(
        place, spec, request=request, on_progress=progress_callback(on_event)
    )
