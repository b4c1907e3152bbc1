"""Options and functions that the commands `append`, `update` and `retry-failed` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from pipelines.cli.options import (
    POSITIVE,
    address_option,
    engine_option,
    json_option,
    log_option,
    memory_option,
    model_option,
    quiet_option,
)
from pipelines.cli.output import naming_max_failed, note, running_job
from pipelines.planning.config import AppendConfig
from pipelines.progress.events import OnEvent, ShouldStop
from pipelines.progress.wording import counted
from storage_formats.format.layout import Layout
from storage_formats.format.object_store import IndexLocation

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Config = TypeVar("_Config", bound=AppendConfig)
_Result = TypeVar("_Result")

_OPTIONS = (
    model_option,
    engine_option("ray"),
    click.option("--workers", type=POSITIVE, help="Number of worker processes.  [default: see 'build --help']"),
    address_option,
    memory_option,
    log_option,
    quiet_option,
    json_option,
)


class WithFailures(Protocol):
    """A result that counts failed inputs."""

    @property
    def failed(self) -> int:
        """Number of failed inputs."""

    @property
    def failed_by_reason(self) -> dict[str, int]:
        """Number of failed inputs by reason."""


def new_rows_options(command: _Command) -> _Command:
    """Add the options that `append`, `update` and `retry-failed` share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_job(
    job: Callable[[_Config, OnEvent, ShouldStop], _Result],
    make_config: Callable[[Path], _Config],
    index: IndexLocation,
    *,
    quiet: bool,
    read_only: bool = False,
) -> _Result:
    """Run `job` with a progress display and a log. If a resumable job stops, its error message says how to resume.

    Args:
        job: function that changes the index.
        make_config: function that takes the directory of the index and returns the request. If `index` is a URL, the
            directory is a working copy.
        index: path or URL of the index.
        quiet: True to show no progress.
        read_only: True if `job` does not change the index.
    """
    from storage_formats.writing.working_copy import working_copy

    opened: list[Path] = []  # the directory, unless the index could not be opened

    def can_resume() -> bool:
        return bool(opened) and Layout(opened[0]).append_plan.exists()

    with (
        running_job(quiet=quiet, can_resume=can_resume) as (on_event, should_stop),
        working_copy(index, read_only=read_only) as copy,
        naming_max_failed(),
    ):
        opened.append(copy.root)
        return job(make_config(copy.root), on_event, should_stop)


def note_failures(result: WithFailures, again: str = "") -> None:
    """If inputs failed, print their number and reasons. `again` is inserted after the word "failed"."""
    if result.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.failed_by_reason.items())
        note(f"{counted(result.failed, 'input')} failed{again}: {reasons}; 'edje-index failures' lists them")
