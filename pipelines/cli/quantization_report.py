"""The option `--report` of `edje-index quantize`, and the options that need `--report`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.options import DEVICE, PATH
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from pipelines.jobs.quantization_report import QuantizeReport

_PRINT_ONLY = "-"
_OPTIONS = (
    click.option(
        "--report",
        is_flag=False,
        flag_value=_PRINT_ONLY,
        type=click.Path(file_okay=False, allow_dash=True, path_type=Path),
        metavar="[DIR]",
        help="Measure how much each precision changes tokens and ranking. With DIR, also write the report to DIR.",
    ),
    click.option(
        "--rows", type=click.IntRange(1, 20_000), help="With --report: number of rows to compare.  [default: 2000]"
    ),
    click.option(
        "--queries",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="With --report: file of queries, as text or .jsonl.  [default: 24 built-in captions]",
    ),
    click.option(
        "--pool", type=click.IntRange(2, 1000), help="With --report: number of candidates per query.  [default: 50]"
    ),
    click.option(
        "--model",
        type=PATH,
        help="With --report: directory of the model bundle.  [default: the bundle that built INDEX]",
    ),
    click.option(
        "--device",
        type=DEVICE,
        help="With --report: device that runs the model.  [default: auto]",
    ),
)


@dataclass(frozen=True)
class ReportRequest:
    """Values of `--report` and of the options that need `--report`.

    Attributes:
        folder: directory to write the report to; None if the report is only printed.
        settings: values of the `ReportConfig` fields that the user set, by field name.
    """

    folder: Path | None
    settings: dict[str, Any]


def report_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds `--report` and related options to a command, and passes their values as `request`."""

    @functools.wraps(function)
    def command(report: Path | None, **others: Any) -> None:
        names = ("rows", "queries", "pool", "model", "device")
        given = {name: value for name in names if (value := others.pop(name)) is not None}
        if report is None and given:
            raise UsageError(f"--{next(iter(given))} needs --report; add --report")
        folder = None if report == Path(_PRINT_ONLY) else report
        function(request=None if report is None else ReportRequest(folder, given), **others)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def measure(
    request: ReportRequest, index: Path, precisions: tuple[str, ...], source: str | None, *, quiet: bool
) -> QuantizeReport:
    """Compare the tokens of `index` in `precisions` with those in `source`, and return the report.

    If `request` names a directory, also write the report to this directory.
    """
    from pipelines.jobs.quantization_report import ReportConfig, measure_precisions
    from pipelines.jobs.quantization_report_files import write_report
    from pipelines.progress.display import progress_display

    with progress_display(quiet=quiet) as on_event:
        report = measure_precisions(ReportConfig(index, precisions, source, **request.settings), on_event)
    if request.folder is not None:
        write_report(report, request.folder)
    return report
