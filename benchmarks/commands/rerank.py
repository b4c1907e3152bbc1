"""The command `edje-index bench rerank`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.commands.output import show
from edje_index.scoring.weights import BUNDLE_SCORE
from pipelines.cli.options import dtype_option, json_option, score_option
from storage_formats.cpus import usable_cpus
from storage_formats.errors import UsageError


@click.command("rerank")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Directory of the model bundle.  [default: random weights with the sizes of MiniLM-L6 and MiniLM-L12]",
)
@click.option(
    "--index",
    type=click.Path(exists=True, path_type=Path),
    help="Index on which each stage of a query is measured too.",
)
@score_option
@click.option("--caption", help="Caption of every pair.  [default: a caption of 16 tokens]")
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    help="Number of pairs per forward pass; repeatable.  [default: 1, 32, 128]",
)
@click.option(
    "--threads",
    multiple=True,
    type=click.IntRange(min=1),
    help="Number of CPU threads; repeatable.  [default: 1 and the number of CPUs]",
)
@click.option(
    "--pool", type=click.IntRange(min=1), default=100, show_default=True, help="Number of candidates per query."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Number of runs of each setting."
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Device that runs the model: auto, cpu, cuda or cuda:N.",
)
@dtype_option
@json_option
def rerank_command(as_json: bool, **options: Any) -> None:
    """Measure the joint encoder in pairs per second, and the duration of each stage of a query.

    \b
    Examples:
      edje-index bench rerank --model model/ --index photos.edje
      edje-index bench rerank --index photos.edje --score logit
      edje-index bench rerank --threads 8 --batch-size 64
    """
    from benchmarks.rerank import RerankBench, bench_rerank

    if options["index"] is None and options["score"] != BUNDLE_SCORE:
        raise UsageError("--score has an effect only with --index: give the index to search, or leave out --score")
    options["threads"] = options["threads"] or tuple(sorted({1, usable_cpus()}))
    report = bench_rerank(RerankBench(**{name: value for name, value in options.items() if value not in (None, ())}))
    lines = []
    for name, rates in report["joint_encoders"].items():
        lines.append(f"{name}, {rates['tokens_per_pair']} tokens per pair, {report['device']}, {report['dtype']}")
        lines += [f"  {setting:24} {rate:10.1f} pairs/s" for setting, rate in rates["median"].items()]
    if "query" in report:
        query = report["query"]
        stages = ", ".join(f"{name} {value:.2f}" for name, value in query["ms"].items())
        lines.append(f"query of {query['pool']} candidates: {query['total_ms']:.1f} ms ({stages})")
    show(report, as_json, lines)
