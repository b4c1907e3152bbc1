"""The jobs that build and tune the nearest-neighbour index of a finished index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.lock import locked_index
from pipelines.planning.machine import available_memory
from pipelines.progress.events import OnEvent, progress_callback

if TYPE_CHECKING:
    from edje_index.indexing.ann_info import AnnInfo
    from edje_index.indexing.ann_recall import Measurement


def run_ann_build(root: Path, ann: str, recall: float, on_event: OnEvent) -> AnnInfo:
    """Build the nearest-neighbour index of the index at `root`, and replace the existing one.

    Args:
        root: directory of the index.
        ann: "auto" or a FAISS factory string; see `AnnRequest`.
        recall: target share of the 100 nearest rows that a search finds, between 0 and 1.
        on_event: called with each progress event.

    Raises:
        UsageError: there is no index at `root`, or `ann` or `recall` is invalid.
        CorruptIndexError: the index is damaged.
        EdjeError: another process is changing the index.
        OSError: a file cannot be written.
    """
    from edje_index.indexing.ann_info import describe_ann
    from edje_index.indexing.faiss_index import AnnRequest, add_ann
    from storage_formats.format.manifest import CommittedIndex

    CommittedIndex.open(root)  # fails before the lock makes a directory
    with locked_index(root):
        request = AnnRequest(ann, recall, available_memory())
        return describe_ann(add_ann(root, request, progress_callback(on_event)))


def run_ann_tune(root: Path, recall: float, on_event: OnEvent) -> list[Measurement]:
    """Choose the number of inverted lists that a search reads; see `tune_ann`.

    Return the measurements, the chosen number last. The list is empty if a search reads all embeddings.

    Raises:
        UsageError: there is no index at `root`, the index has no nearest-neighbour index, or `recall` is out of range.
        CorruptIndexError: the index is damaged.
        EdjeError: another process is changing the index.
        OSError: a file cannot be written.
    """
    from edje_index.indexing.faiss_index import tune_ann
    from storage_formats.format.manifest import CommittedIndex

    CommittedIndex.open(root)
    with locked_index(root):
        return tune_ann(root, recall, progress_callback(on_event))


def ann_info(root: Path) -> AnnInfo:
    """Describe the nearest-neighbour index of the index at `root`. Raises the same errors as `Manifest.load`."""
    from edje_index.indexing.ann_info import describe_ann
    from storage_formats.format.manifest import Manifest

    return describe_ann(Manifest.load(root))
