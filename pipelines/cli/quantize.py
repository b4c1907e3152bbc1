"""`edje-index quantize`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.output import json_option, print_json, this_command
from pipelines.cli.quantization_report import ReportRequest, measure, report_options
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from pipelines.engines.base import Engine
    from pipelines.jobs.quantization_report import QuantizeReport
    from pipelines.jobs.quantize import QuantizeConfig, QuantizeResult


@click.command()
@click.argument("index", type=click.Path(path_type=Path))
@click.option("--to", "to", multiple=True, metavar="NAME", help="Precision to add; may be repeated.")
@click.option("--drop", multiple=True, metavar="NAME", help="Precision to remove afterwards; may be repeated.")
@click.option("--from", "source", metavar="NAME", help="Precision to read.  [default: the one of the longest records]")
@click.option(
    "--engine", type=click.Choice(["inline", "ray"]), default="inline", show_default=True, help="What converts."
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes, with --engine ray.  [default: 2]")
@click.option("--address", metavar="HOST:PORT", help="Ray cluster to join, with --engine ray.")
@report_options
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def quantize(
    index: Path,
    to: tuple[str, ...],
    drop: tuple[str, ...],
    source: str | None,
    engine: str,
    workers: int | None,
    address: str | None,
    request: ReportRequest | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Store the tokens of INDEX in further precisions, without the vision model.

    Known precisions: bf16 fp16 fp8 mxfp8 int8 nvfp4 mxfp4 sign1. The index can be read all the while. The same command,
    run again, resumes what was stopped, and does nothing where all is there.

    --report compares tokens and re-ranking at every precision, or at those of --to, with the stored one of the longest
    records. It needs no labels and no stored copies, and without --to and --drop changes nothing; with them it comes
    first.

    \b
    Examples:
      edje-index quantize photos.edje --to fp8 --to nvfp4
      edje-index quantize photos.edje --to fp8 --drop bf16
      edje-index quantize photos.edje --report
      edje-index quantize photos.edje --report costs/ --queries captions.txt
    """
    if not (to or drop or request):
        raise UsageError("nothing to do: give --to, --drop or --report")
    found: dict[str, Any] = {}
    if request is not None:
        report = measure(request, index, to, source, quiet=quiet)
        if not as_json:
            _print_report(report, request)
        found = {"report": asdict(report)} if to or drop else asdict(report)
    if to or drop:
        from pipelines.jobs.quantize import QuantizeConfig

        result = _run(QuantizeConfig(index, to, drop, source), _engine(engine, workers, address), quiet=quiet)
        if not as_json:
            _print(index, result)
        found |= asdict(result)
    if as_json:
        print_json(found)


def _print_report(report: QuantizeReport, request: ReportRequest) -> None:
    from pipelines.jobs.quantization_report_files import table

    for line in table(report):
        click.echo(line)
    if request.folder is not None:
        click.echo(f"written: {request.folder}")


def _print(index: Path, result: QuantizeResult) -> None:
    for name, size in result.bytes_per_image.items():
        click.echo(f"{name:6} {size:7,} bytes an image{'  (new)' if name in result.added else ''}")
    click.echo(f"{index}: {result.rows:,} rows, {result.seconds:.1f} s")


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    if name == "inline":
        if workers is not None or address is not None:
            raise UsageError("--workers and --address are for '--engine ray'; give that too")
        from pipelines.engines.inline import InlineEngine

        return InlineEngine()
    from pipelines.engines.ray_engine import RayEngine

    return RayEngine(workers or 2, address=address)


def _run(config: QuantizeConfig, engine: Engine, *, quiet: bool) -> QuantizeResult:
    from pipelines.jobs.quantize import quantize_index
    from pipelines.progress.display import progress_display
    from pipelines.progress.stopping import JobStopped, stop_on_signals

    try:
        with stop_on_signals() as should_stop, progress_display(quiet=quiet) as on_event:
            return quantize_index(config, engine, on_event, should_stop)
    except JobStopped as error:
        raise JobStopped(f"{error}. To resume: {this_command()}") from error
