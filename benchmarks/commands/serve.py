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
@click.option("--queries", type=FILE, required=True, help="File of queries, one per line, or .jsonl with `query`.")
@model_option
@dtype_option
@click.option(
    "--pool", "pools", type=POSITIVE, multiple=True, help="Candidates per search; repeatable.  [default: 100]"
)
@click.option("--precision", "precisions", metavar="NAME", multiple=True, help="Precision of the tokens; repeatable.")
@click.option(
    "--clients", type=POSITIVE, multiple=True, help="Clients of the closed loop; repeatable.  [default: 1, 4, 16, 64]"
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Duration of each measurement."
)
@click.option(
    "--overload",
    "overload_seconds",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds of 1.5 times the load that the service keeps up with, with hostile clients. 0 leaves it out.",
)
@seed_option
@click.option("--report", type=PATH, help="Directory for a report with a plot.")
@json_option
def serve_command(index: Path, queries: Path, report: Path | None, as_json: bool, **options: Any) -> int:
    """Measure `edje-index serve` under load: latency by offered load, and the load that it keeps up with.

    Searches are sent at random times (a Poisson process), whether earlier ones are answered or not, and latency counts
    from the planned time. With --overload, every answer is compared with that of the library, while other clients send
    malformed, oversized and slow requests. The exit code is 1 if an answer is wrong or late, or the service fails.

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
