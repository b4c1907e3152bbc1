"""The command `edje-index quantize`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import (
    FILE,
    PATH,
    POSITIVE,
    index_argument,
    json_option,
    quiet_option,
)
from pipelines.cli.output import print_json, print_line, run_job, run_steps
from pipelines.progress.wording import counted
from storage_formats.errors import UsageError
from storage_formats.remote.urls import IndexLocation

_PRINT_ONLY = Path("-")


@click.command()
@index_argument
@click.option(
    "--to", "to", multiple=True, metavar="NAME", help="Precision to add; repeatable."
)
@click.option(
    "--drop", multiple=True, metavar="NAME", help="Precision to remove; repeatable."
)
@click.option(
    "--from",
    "source",
    metavar="NAME",
    help="Precision to convert from.  [default: the most accurate precision stored]",
)
@click.option(
    "--workers",
    type=POSITIVE,
    help="Number of Ray workers.  [default: convert in this process]",
)
@click.option(
    "--address", metavar="HOST:PORT", help="Ray cluster to join, with --workers."
)
@click.option(
    "--report",
    is_flag=False,
    flag_value=str(_PRINT_ONLY),
    type=click.Path(file_okay=False, allow_dash=True, path_type=Path),
    metavar="[DIR]",
    help=(
        "Measure how much each precision changes tokens and ranking. With DIR, also"
        " write the report to DIR."
    ),
)
@click.option(
    "--queries",
    type=FILE,
    help=(
        "With --report: file of queries, as text or .jsonl.  [default: the captions in"
        " INDEX, or 24 built-in captions]"
    ),
)
@click.option(
    "--model",
    type=PATH,
    help=(
        "With --report: directory of the model bundle.  [default: the bundle that built"
        " INDEX]"
    ),
)
@quiet_option
@json_option
def quantize(
    index: IndexLocation,
    to: tuple[str, ...],
    report: Path | None,
    queries: Path | None,
    model: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Add or remove precisions of the tokens in INDEX.

    Precisions are for example fp8, nvfp4, gauss2 (2 bits) and sign1 (1 bit); the error
    for an unknown name lists all. INDEX can be searched during the conversion. Run the
    same command again to resume a stopped conversion.

    With --report, the command first measures how much each precision changes the tokens
    and the re-ranking, compared with the most accurate precision stored, and says which
    precision to keep. The report covers the precisions of --to, else those of INDEX.

    \b
    Examples:
      edje-index quantize photos.edje --to fp8 --to nvfp4
      edje-index quantize photos.edje --to fp8 --drop bf16
      edje-index quantize photos.edje --report
      edje-index quantize photos.edje --report costs/ --queries captions.txt
    """
    is_change = to or options["drop"]
    if not (is_change or report):
        raise UsageError("nothing to do: give --to, --drop or --report")
    if (queries or model) and report is None:
        raise UsageError("--queries and --model need --report; add --report")
    output: dict[str, Any] = {}
    if report is not None:
        if not isinstance(index, Path):
            raise UsageError(
                f"--report needs an index on a file system; copy {index} to a directory"
                " first"
            )
        from edje_index.evaluation.quantization import measure_precisions
        from edje_index.evaluation.report import (
            check_report_folder,
            quantization_figure,
            quantization_report,
            write_report,
        )
        from pipelines.jobs.quantize import precision_to_read
        from storage_formats.format.manifest import Manifest

        if report != _PRINT_ONLY:
            check_report_folder(report)
        reference = precision_to_read(index, Manifest.load(index), options["source"])
        measured = run_steps(
            measure_precisions,
            index,
            reference,
            to,
            queries=queries,
            model=model,
            quiet=quiet,
            stopped="stopped before the report was done",
        )
        text = quantization_report(measured)
        if report != _PRINT_ONLY:
            write_report(report, text, asdict(measured))
            (report / "report.svg").write_text(quantization_figure(measured))
        if not as_json:
            for line in text.splitlines():
                print_line(line)
            if report != _PRINT_ONLY:
                print_line(f"report written to {report}")
        output = {"report": asdict(measured)} if is_change else asdict(measured)
    if is_change:
        from pipelines.jobs.quantize import quantize_index

        if options["address"] is not None and options["workers"] is None:
            raise UsageError("--address needs --workers; add --workers")
        result = run_job(
            quantize_index, index, to, resume=index, quiet=quiet, **options
        )
        if not as_json:
            for name, size in result.bytes_per_image.items():
                new = "  (new)" if name in result.added else ""
                print_line(f"{name:6} {size:7,} bytes per image{new}")
            print_line(
                f"{index}: {counted(result.rows, 'row')}, {result.seconds:.1f} s"
            )
        output |= asdict(result)
    if as_json:
        print_json(output)
