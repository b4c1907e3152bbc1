"""Writes a new index in a temporary directory, and renames the directory once the index is complete."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipelines.engines.base import describe_error
from pipelines.jobs.lock import locked_index
from pipelines.progress.events import JobStopped
from storage_formats.atomic import fsync_parent
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout


def partial_directory(out: Path) -> Path:
    """Return the temporary directory of an unfinished index `out`."""
    return out.absolute().with_name(f".{out.name}.partial")


def check_free(out: Path) -> None:
    """Raise UsageError if a new index cannot be written to `out`: it exists and is not empty, or is inside an index."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out.absolute()} exists already; choose another output directory", parameter="out")
    for parent in out.resolve().parents:
        if Layout(parent).manifest.exists():
            raise UsageError(
                f"{out.absolute()} is inside the index {parent}; choose another output directory", parameter="out"
            )


@contextlib.contextmanager
def new_index(out: Path, plan: str, spec: IndexSpec) -> Iterator[Path]:
    """Yield a temporary directory in which to write a new index. At the end, rename the directory to `out`.

    The temporary directory is `.<name>.partial` next to `out`. If the job stops, this directory and its finished shards
    remain. A directory of an earlier job is emptied first, unless the earlier job had the same `plan`.

    Args:
        out: directory of the new index.
        plan: text that identifies the job and its settings.
        spec: sizes and precisions of the new index.

    Raises:
        UsageError: `out` exists already, or is inside an index.
        JobStopped: a file cannot be written.
        EdjeError: another process is writing the same index.
    """
    from storage_formats.writing.begin import begin_index
    from storage_formats.writing.publish import remove_build

    out = out.absolute()
    check_free(out)
    partial = partial_directory(out)
    try:
        with locked_index(partial):
            _keep_only(partial, plan)
            begin_index(partial, spec)
            yield partial
            remove_build(Layout(partial))
        partial.replace(out)
        fsync_parent(out)
    except OSError as error:
        raise JobStopped(f"cannot write {partial}: {describe_error(error)}; finished shards are kept") from error


def _keep_only(partial: Path, plan: str) -> None:
    """Remove all files in `partial` except the lock, unless a job with the same `plan` wrote them."""
    from storage_formats.atomic import write_json_atomic
    from storage_formats.format.index_files import read_index_file

    layout, marker = Layout(partial), {"plan": plan}
    try:
        if json.loads(read_index_file(partial, layout.copying)) == marker:
            return
    except (OSError, ValueError, RecursionError):
        pass  # nothing is there, or it was damaged
    for path in {*partial.iterdir(), *layout.build.iterdir()} - {layout.build, layout.lock}:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    write_json_atomic(layout.copying, marker)
