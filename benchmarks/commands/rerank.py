"""`edje-index bench rerank`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.output import dtype_option, json_option, show
from storage_formats.cpus import usable_cpus


@click.command("rerank")
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Bundle.  [default: MiniLM-L6 and L12 sized]"
)
@click.option("--index", type=click.Path(exists=True, path_type=Path), help="Also the stages of a query on this index.")
@click.option("--caption", help="Text of every pair.  [default: one of 16 tokens]")
@click.option(
    "--batch-size",
    "batch_sizes",
    multiple=True,
    type=click.IntRange(min=1),
    help="Pairs in one pass; may be repeated.  [default: 1, 32, 128]",
)
@click.option(
    "--threads", multiple=True, type=click.IntRange(min=1), help="May be repeated.  [default: 1 and the CPUs]"
)
@click.option("--pool", type=click.IntRange(min=1), default=100, show_default=True, help="Candidates of a query.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each setting.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@dtype_option
@json_option
def rerank_command(
    model: Path | None,
    index: Path | None,
    caption: str | None,
    batch_sizes: tuple[int, ...],
    threads: tuple[int, ...],
    pool: int,
    repeats: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Pairs a second of a joint encoder here, and where a query spends its time.

    \b
    Examples:
      edje-index bench rerank --model model/ --index photos.edje
      edje-index bench rerank --threads 8 --batch-size 64
    """
    from benchmarks.rerank import CAPTION, RerankBench, bench_rerank

    chosen = threads or tuple(sorted({1, usable_cpus()}))
    bench = RerankBench(
        model, index, caption or CAPTION, batch_sizes or (1, 32, 128), chosen, pool, repeats, device, dtype
    )
    report = bench_rerank(bench)
    lines = []
    for name, found in report["joint_encoders"].items():
        lines.append(f"{name}, {found['tokens_per_pair']} tokens a pair, {report['device']}, {report['dtype']}")
        lines += [f"  {setting:24} {rate:10.1f} pairs/s" for setting, rate in found["median"].items()]
    if "query" in report:
        query = report["query"]
        stages = ", ".join(f"{name} {value:.2f}" for name, value in query["ms"].items())
        lines.append(f"query of {query['pool']} candidates: {query['total_ms']:.1f} ms ({stages})")
    show(report, as_json, lines)
