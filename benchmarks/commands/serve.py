"""The command `edje-index bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.commands.output import show
from pipelines.cli.options import FILE, PATH, POSITIVE, dtype_option, json_option, model_option, seed_option
from storage_formats.extras import name_missing_extra


@click.command("serve")
@click.argument("index", type=PATH)
@click.option(
    "--queries",
    type=FILE,
    required=True,
    help="Text file with one query per line, or .jsonl file with the key `query`.",
)
@model_option
@dtype_option
@click.option(
    "--pool", "pools", type=POSITIVE, multiple=True, help="Number of candidates per search; repeatable.  [default: 100]"
)
@click.option(
    "--precision",
    "precisions",
    metavar="NAME",
    multiple=True,
    help="Precision of the tokens; repeatable.  [default: first precision of the index]",
)
@click.option(
    "--clients",
    type=POSITIVE,
    multiple=True,
    help="Number of clients that send one search at a time; repeatable.  [default: 1, 4, 16, 64]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="Duration of each measurement in seconds.",
)
@click.option(
    "--overload",
    "overload_seconds",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Duration of an overload test in seconds; 0 for no test.",
)
@seed_option
@click.option("--report", type=PATH, help="Directory for the report: Markdown, JSON and a plot.")
@json_option
def serve_command(index: Path, queries: Path, report: Path | None, as_json: bool, **options: Any) -> int:
    """Measure the latency of `edje-index serve` under increasing load.

    The report also gives the highest load that the service keeps up with.

    Searches are sent at random times (a Poisson process) and do not wait for earlier responses. The latency is measured
    from the planned time of a search.

    With --overload, clients send 1.5 times the highest load, and malformed, oversized and slow requests. Each response
    is compared with the result of `TokenIndex.search`. The exit code is 1 if a response is wrong or late, or if the
    service fails.

    \b
    Examples:
      edje-index bench serve photos.edje --queries captions.txt
      edje-index bench serve photos.edje --queries captions.txt --pool 10 --pool 100 --pool 1000 --report out
      edje-index bench serve photos.edje --queries captions.txt --overload 600
    """
    with name_missing_extra("serve"):
        from benchmarks.serve.bench import ServeBench, bench_serve
        from benchmarks.serve.report import write_report
    from pipelines.cli.search_queries import read_queries

    given = {name: value for name, value in options.items() if value not in (None, ())}
    result = bench_serve(ServeBench(index, read_queries(queries), **given), lambda line: click.echo(line, err=True))
    if report is not None:
        for path in write_report(result, report):
            click.echo(f"wrote {path}", err=True)
    lines = [
        f"pool {entry['pool']}, {entry['precision']}: knee at {entry['knee_per_s']:.2f} searches per second"
        for entry in result["workloads"]
    ]
    lines.append(f"memory of the service: at most {result['memory_peak'] / 2**20:.0f} MiB")
    if "overload" in result:
        lines.append(f"overload: {result['overload']['verdict']}")
    show(result, as_json, lines)
    return 1 if result.get("overload", {}).get("problems") else 0
