"""Checks the output directory of a build."""

from __future__ import annotations

import os
from pathlib import Path

from pipelines.planning.config import BuildConfig
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout


def check_output(config: BuildConfig) -> None:
    """Raise UsageError if `config.out` is a source, a file, or a directory with files that are not part of an index."""
    out = config.out
    if any(os.path.realpath(source) == os.path.realpath(out) for source in config.sources):
        raise UsageError(f"{out} is also one of the sources; choose another output directory", parameter="out")
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is not a directory; choose another output directory", parameter="out")
    layout = Layout(out)
    if layout.manifest.exists() or layout.plan.exists():
        return
    if foreign := sorted(_foreign_entries(layout)):
        raise UsageError(
            f"{out} is not empty and not an index (it contains {', '.join(foreign[:3])}); choose another directory",
            parameter="out",
        )


def has_stored_work(root: Path) -> bool:
    """Return True if a stopped build has left a plan."""
    return Layout(root).plan.exists()


def _foreign_entries(layout: Layout) -> set[str]:
    """Return the names of the files and directories in an output directory that are not part of an index."""
    # A build that was stopped while it listed its sources leaves `build/` without a plan.
    listing = {layout.lock.name, layout.input_lists.name}
    names = {entry.name for entry in layout.root.iterdir()} - {layout.build.name}
    if layout.build.is_dir():
        names |= {entry.name for entry in layout.build.iterdir()} - listing
    return {name for name in names if not name.startswith(f".{layout.plan.name}.")}  # a plan that was being written
