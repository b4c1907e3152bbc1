"""Sources of images: directories, archives, Parquet files, lists of paths, and single image files."""

from __future__ import annotations

from pipelines.sources.base import Source
from pipelines.sources.dedupe import digested, hashed, mark_duplicates
from pipelines.sources.opening import ACCEPTED, count_ignored, iter_all, open_source, open_sources, without_nested

__all__ = [
    "ACCEPTED",
    "Source",
    "count_ignored",
    "digested",
    "hashed",
    "iter_all",
    "mark_duplicates",
    "open_source",
    "open_sources",
    "without_nested",
]
