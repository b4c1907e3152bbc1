"""The command `edje-index quantize`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.options import (
    POSITIVE,
    engine_option,
    json_option,
    location,
    log_option,
    quiet_option,
)
from pipelines.cli.output import print_json, print_line, running_job
from pipelines.cli.quantization_report import ReportRequest, measure, report_options
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError
from storage_formats.format.object_store import IndexLocation

if TYPE_CHECKING:
    from pipelines.engines.base import Engine
    from pipelines.jobs.quantization_report import QuantizeReport
    from pipelines.jobs.quantize import QuantizeResult


@click.command()
@click.argument("index", type=location)
@click.option("--to", "to", multiple=True, metavar="NAME", help="Precision to add; repeatable.")
@click.option("--drop", multiple=True, metavar="NAME", help="Precision to remove; repeatable.")
@click.option(
    "--from", "source", metavar="NAME", help="Precision to convert from.  [default: the most accurate precision stored]"
)
@engine_option("inline")
@click.option("--workers", type=POSITIVE, help="Number of worker processes, with --engine ray.  [default: 2]")
@click.option("--address", metavar="HOST:PORT", help="Ray cluster to join, with --engine ray.")
@report_options
@log_option
@quiet_option
@json_option
def quantize(
    index: IndexLocation,
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
    """Add or remove precisions of the tokens in INDEX.

    The precisions are bf16, fp16, fp8, mxfp8, int8, nvfp4, mxfp4 and sign1. INDEX can be searched during the
    conversion. Run the same command again to resume a stopped conversion.

    INDEX is a directory, or a URL that begins with s3://, gs:// or az://.

    With --report, the command first measures how much each precision changes the tokens and the re-ranking, compared
    with the most accurate precision stored. The report covers the precisions of --to, or all precisions without --to.

    \b
    Examples:
      edje-index quantize photos.edje --to fp8 --to nvfp4
      edje-index quantize photos.edje --to fp8 --drop bf16
      edje-index quantize photos.edje --report
      edje-index quantize photos.edje --report costs/ --queries captions.txt
    """
    if not (to or drop or request):
        raise UsageError("nothing to do: give --to, --drop or --report")
    output: dict[str, Any] = {}
    if request is not None:
        if not isinstance(index, Path):
            raise UsageError(f"--report needs an index on a file system; copy {index} to a directory first")
        report = measure(request, index, to, source, quiet=quiet)
        if not as_json:
            _print_report(report, request)
        output = {"report": asdict(report)} if to or drop else asdict(report)
    if to or drop:
        from pipelines.jobs.quantize import QuantizeConfig, quantize_at

        chosen_engine = _engine(engine, workers, address)
        with running_job(quiet=quiet) as (on_event, should_stop):
            make_config = functools.partial(QuantizeConfig, to=to, drop=drop, source=source)
            result = quantize_at(index, make_config, chosen_engine, on_event, should_stop)
        if not as_json:
            _print(index, result)
        output |= asdict(result)
    if as_json:
        print_json(output)


def _print_report(report: QuantizeReport, request: ReportRequest) -> None:
    from pipelines.jobs.quantization_report_files import table

    for line in table(report):
        print_line(line)
    if request.folder is not None:
        print_line(f"report written to {request.folder}")


def _print(index: IndexLocation, result: QuantizeResult) -> None:
    for name, size in result.bytes_per_image.items():
        print_line(f"{name:6} {size:7,} bytes per image{'  (new)' if name in result.added else ''}")
    print_line(f"{index}: {counted(result.rows, 'row')}, {result.seconds:.1f} s")


def _engine(name: str, workers: int | None, address: str | None) -> Engine:
    from pipelines.engines import open_engine

    if name == "inline" and (workers is not None or address is not None):
        raise UsageError("--workers and --address need --engine ray; add --engine ray")
    return open_engine(name, workers or 2, address=address)
