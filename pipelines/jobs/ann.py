"""The job of `edje-index ann build`, and the changes of a nearest-neighbour index that
other jobs make.
"""

from __future__ import annotations

from collections.abc import Sequence

from edje_index.indexing.faiss_build import (
    AnnRequest,
    build_ann,
)
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
from storage_formats.format.manifest import (
    Ann,
    Manifest,
)
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


def build_copied_ann(
    place: Place,
    spec: IndexSpec,
    origins: Sequence[Manifest],
    on_event: OnEvent,
) -> Ann:
    """Build the nearest-neighbour index of copied rows, if at least one of their
    `origins` has one. Return its description for the manifest. If no origin has one,
    return the description that the first origin has.

    The target recall is the highest among the origins. If all origins have the same
    kind, the new index gets this kind. It gets the default kind for its own number of
    rows if the kinds differ, or if each origin has the default kind for its number of
    rows.

    Args:
        origins: manifests of the indexes from which the rows were copied.
    """
    searchable = [manifest for manifest in origins if manifest.ann_files]
    if not searchable:
        return origins[0].ann
    requests = [AnnRequest.like(manifest) for manifest in searchable]
    kind, *others = {request.ann for request in requests}
    recall = max(request.recall for request in requests)
    request = AnnRequest("auto" if others else kind, recall)
    return new_ann(place, spec, request, on_event)
