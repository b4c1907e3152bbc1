"""What a killed build leaves in a finished index."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pipelines.jobs.lock import locked_index
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout


def remove_leftovers(root: Path) -> None:
    """Remove `build/` of a finished index if its build was killed before it could do so."""
    from storage_formats.writing.publish import has_build_leftovers, remove_build

    layout = Layout(root)
    with contextlib.suppress(OSError, EdjeError):  # it is read-only, or another process is at work
        if has_build_leftovers(layout):
            with locked_index(root):
                remove_build(layout)


def refuse_unfinished_append(layout: Layout) -> None:
    """Raise EdjeError if an append to the index was stopped."""
    if layout.append_plan.exists():
        raise EdjeError(
            f"an append to {layout.root} has not finished; run the same append again, or discard it with 'edje-index "
            "gc'"
        )
