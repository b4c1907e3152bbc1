"""Handles files of killed builds and stopped changes in a finished index."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.jobs.lock import locked_index
from pipelines.planning.new_rows import is_committed
from pipelines.planning.plan import discard_change, read_plan
from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex


def remove_leftovers(root: Path) -> None:
    """Remove `build/` from a finished index. A build that is killed after its commit leaves this directory."""
    # The directory stays if the index is read-only or another process is changing the index.
    from storage_formats.writing.publish import has_build_leftovers, remove_build

    layout = Layout(root)
    with contextlib.suppress(OSError, EdjeError):  # a read-only index, or another process holds the lock
        if has_build_leftovers(layout):
            with locked_index(root):
                remove_build(layout)


def discard_stopped_copy(index: CommittedIndex, on_event: OnEvent) -> None:
    """Remove the files of a stopped compaction or conversion, if there is one, and say so.

    The caller must hold the lock of the index, and there must be no stopped append, update or retry.
    """
    from storage_formats.writing.publish import remove_build
    from storage_formats.writing.snapshots import kept_snapshots, remove_unnamed_files

    layout = Layout(index.root)
    if layout.compaction.exists() or layout.receipt(0).parent.exists():
        message = "removing the unfinished files of an earlier command; a stopped compact or quantize begins anew"
        on_event(StatusMessage(message))
        remove_unnamed_files(layout, kept_snapshots(index))
        remove_build(layout)


def refuse_unfinished_append(index: CommittedIndex, *, dry_run: bool = False) -> None:
    """Raise EdjeError if an append, update or retry of `index` has not finished.

    Unless `dry_run` is True, the files of one that was killed after its commit are removed. The caller must then hold
    the lock of the index.
    """
    from storage_formats.writing.publish import remove_build

    plan = read_plan(index.root, append=True)
    if plan is None:
        return
    if not is_committed(plan, index):
        raise EdjeError(
            f"'{plan.change}' of {index.root} has not finished; run 'edje-index {plan.change}' again with the same "
            f"arguments, or {discard_change(index.root)}"
        )
    if not dry_run:
        remove_build(Layout(index.root))
