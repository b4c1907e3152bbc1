"""Reads and writes the sources that are recorded in an index. An update lists these sources again.

A build records its sources in the settings of the index. Later changes record the sources of all rows in the entry
`indexed_sources` of these settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from storage_formats.errors import CorruptIndexError, UsageError

if TYPE_CHECKING:
    from pipelines.sources import Source
    from storage_formats.format.manifest import Manifest

SOURCES_MEMBER = "indexed_sources"
"""Key of the recorded sources in the settings of an index."""


@dataclass(frozen=True)
class SourceGroup:
    """The sources that were given to one command, as absolute paths, and their path column (see `BuildConfig`)."""

    sources: tuple[str, ...]
    column: str | None = None


def recorded_sources(manifest: Manifest) -> tuple[SourceGroup, ...] | None:
    """Return the sources of all rows, or None if the index does not record the sources of some rows.

    Raises:
        CorruptIndexError: the recorded sources are damaged.
    """
    settings = manifest.settings
    try:
        if settings.get(SOURCES_MEMBER, ()) is None:
            return None
        if SOURCES_MEMBER in settings:
            return tuple(SourceGroup(_texts(group["sources"]), group["column"]) for group in settings[SOURCES_MEMBER])
        if len(manifest.spec.used_segments) > 1 or manifest.row_maps or "sources" not in settings:
            return None
        return (SourceGroup(_texts(settings["sources"]), settings.get("column")),)
    except (KeyError, TypeError) as error:
        raise CorruptIndexError(
            f"the recorded sources of the index are damaged: {error!r}; name all sources"
        ) from error


def holds_clips(manifest: Manifest) -> bool:
    """Return True if video files are inputs of the index."""
    return manifest.settings.get("frames") is not None


def _texts(value: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError("not a list of sources")
    return tuple(map(str, value))


def with_sources(manifest: Manifest, groups: tuple[SourceGroup, ...]) -> Manifest:
    """Return a copy of `manifest` that records `groups` as the sources of all rows."""
    return replace(manifest, settings={**manifest.settings, SOURCES_MEMBER: [asdict(group) for group in groups]})


def with_further_source(before: Manifest, changed: Manifest, group: SourceGroup) -> Manifest:
    """Return a copy of `changed` that records the sources of `before` and the sources `group`.

    If `before` does not record its sources, return `changed` itself.
    """
    groups = recorded_sources(before)
    return changed if groups is None else with_sources(changed, tuple(dict.fromkeys((*groups, group))))


def open_recorded(groups: tuple[SourceGroup, ...] | None, *, clips: bool) -> list[Source]:
    """Open the recorded sources. A source that is equal to another source, or inside another source, is skipped.

    Raises:
        UsageError: the sources are not recorded, or a source cannot be used.
    """
    from pipelines.sources import open_sources, without_nested
    from pipelines.sources.base import STANDARD_INPUT

    if groups is None:
        raise UsageError("the index does not record the sources of all its rows; name all sources", parameter="sources")
    if any(STANDARD_INPUT in group.sources for group in groups):
        raise UsageError(
            "the index was made from a list on standard input, which cannot be read again; name all sources",
            parameter="sources",
        )
    return without_nested(
        [source for group in groups for source in open_sources(group.sources, group.column, clips=clips)]
    )
