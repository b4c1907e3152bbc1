"""Changes of an index by jobs that a second run can finish."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.engines.base import describe_error
from pipelines.progress.events import JobStopped, OnEvent, StatusMessage
from storage_formats.change import Change, begin_change


@contextlib.contextmanager
def changing(
    root: str | Path,
    kind: str,
    request: Mapping[str, Any] | None,
    on_event: OnEvent,
    *,
    is_new: bool = False,
) -> Iterator[Change]:
    """Begin or resume a change that a second run can finish, see `begin_change`. An
    OSError becomes JobStopped.
    """

    def notify(text: str) -> None:
        on_event(StatusMessage(text))

    with (
        begin_change(root, kind, request, is_new=is_new, notify=notify) as change,
        resumable(root),
    ):
        yield change


@contextlib.contextmanager
def resumable(root: str | Path) -> Iterator[None]:
    """Context manager that converts an OSError, such as a full disk, to JobStopped."""
    try:
        yield
    except OSError as error:
        raise JobStopped(
            f"cannot write {root}: {describe_error(error)}; what is finished is kept"
        ) from error
