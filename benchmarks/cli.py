"""The command group `edje-index bench`: the options of each benchmark, and the
printing of its results.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.report import Report
from pipelines.cli.options import (
    FILE,
    PATH,
    POSITIVE,
    Command,
    dtype_option,
    images_option,
    json_option,
    model_option,
    option,
    score_option,
    stored_precisions_option,
)
from pipelines.cli.output import note, wants_json
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import SHARD_SIZE, IndexSpec

_EXISTING = click.Path(exists=True, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


_report_option = click.option(
    "--report", type=_FOLDER, help="Directory for the report, in Markdown and JSON."
)


def _finish(
    report: Report,
    lines: Sequence[str],
    folder: Path | None = None,
    name: str = "",
) -> None:
    """Print a report as `lines`, or as one JSON object with --json. If `folder` is
    given, also write the report to two files in `folder`, one with the lines and one
    with the JSON object. The names of the files consist of the date and `name`.
    """
    if folder is not None:
        from edje_index.evaluation.report import write_report

        dated = f"{report['environment']['date']}-{name}"
        write_report(folder, "\n".join(lines) + "\n", report, dated)
        note(f"wrote {folder / dated}.md and .json")
    # `print_json` would sort the keys. Here they keep the order of the measurements.
    text = json.dumps(report, default=str) if wants_json() else "\n".join(lines)
    click.echo(text)


@click.group()
def bench() -> None:
    """Run a benchmark: fetching, codecs, building, scoring, serving, whole systems, or
    the tables of the paper.

    Results are medians over several runs. From machine to machine, ratios vary less
    than durations.
    """


bench.command_class = Command


@bench.command("make-synthetic")
@click.argument("out", type=PATH)
@option("--rows", POSITIVE, required=True)
@stored_precisions_option
@json_option
def make_synthetic_command(out: Path, rows: int, precisions: tuple[str, ...]) -> None:
    """Write an index of random blocks to OUT for benchmarks. A block has 64 tokens of
    width 384, as in the EDJE paper.

    \b
    Example:
      edje-index bench make-synthetic /tmp/random.edje --rows 100000

    Options:
        --rows: Number of rows.
    """
    from benchmarks.synthetic import make_synthetic

    spec = IndexSpec(
        rows,
        SHARD_SIZE,
        (64, 384),
        embed_dim=384,
        precisions=tuple(dict.fromkeys(precisions)),
    )
    make_synthetic(out, spec)
    report = {"index": str(out), "rows": rows, "shards": spec.shards}
    _finish(report, [f"{rows} rows in {spec.shards} shards"])


@bench.command("fetch")
@click.argument("index", type=PATH)
@option("--precision", key="precisions", multiple=True)
@option("--pool", POSITIVE, default=50_000)
@option("--quick", bool)
@option("--paper", bool)
@option("--repeats", POSITIVE, default=5)
@_report_option
@json_option
def fetch_command(index: Path, report: Path | None, **options: Any) -> None:
    """Measure how fast blocks of INDEX are fetched, and compare the rate with the disk
    and with other libraries. Linux only.

    The first line says how long the benchmark takes. The libraries of the extra `bench`
    are compared if they are installed. Some libraries need a copy of the blocks, which
    is written beside INDEX and removed at the end. If the command is interrupted, run
    it again to continue.

    \b
    Examples:
      edje-index bench fetch photos.edje --quick
      edje-index bench fetch photos.edje --precision fp8 --pool 5000 --report out

    Options:
        --precision: Precision to compare with other libraries; repeatable. For the
            other stored precisions, only the large fetch of this package is
            measured.  [default: all stored precisions]
        --pool: Number of blocks per large fetch, limited to half the rows of the index.
        --quick: Take at most three minutes: fewer runs, only the first GiB of the
            index, and other libraries at one precision only.
        --paper: Repeat only the test of the EDJE paper: 50,000 of 100,000 blocks,
            contiguous and random.
        --repeats: Number of runs of each measurement.
    """
    from benchmarks.fetch.bench import bench_fetch
    from benchmarks.fetch.report import draw, report_lines

    # SIGTERM raises KeyboardInterrupt, which also ends the process of the current run.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = bench_fetch(index, note, **options)
    finally:
        signal.signal(signal.SIGTERM, before)
    picture = None
    if report is not None:
        picture = f"{result['environment']['date']}-fetch.png"
        report.mkdir(parents=True, exist_ok=True)
        with name_missing_extra("bench"):
            draw(result["rows"], report / picture)
    _finish(result, list(report_lines(result, picture)), report, "fetch")


@bench.command("quantize")
@json_option
def quantize_command() -> None:
    """Measure the speed of codecs, without and with an offset.

    Rates are in GB/s of bfloat16 tokens. The task "gather" decodes random records in
    the page cache.

    \b
    Example:
      edje-index bench quantize
    """
    from benchmarks.quantize import bench_quantize, report_lines

    report = bench_quantize()
    _finish(report, list(report_lines(report)))


@bench.command("build")
@click.argument("photos", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option("--model", _EXISTING, required=True)
@option("--images", POSITIVE, default=1000)
@option("--device", click.Choice(["cpu", "cuda"]), default="cpu")
@json_option
def build_command(photos: Path, model: Path, images: int, device: str) -> None:
    """Compare the cost of `edje-index build` with a loop that only decodes and encodes
    images. Linux only.

    Both engines are measured, with two threads: on a CPU in float32, on a GPU in
    bfloat16. The cost is processor time and memory. For the loop and for each engine, a
    second line shows the seconds per stage, and the images per second of the model
    alone. In a build, "read" and "decode" run beside the model, and "wait" is the time
    that the model waits for them.

    \b
    Example:
      edje-index bench build ~/photos --model model/ --images 2000

    Options:
        --model: Directory of the model bundle.
        --images: Number of images to index. If PHOTOS has fewer images, images are used
            several times.
        --device: Device that runs the model.
    """
    from benchmarks.build import bench_build, report_lines

    paths = sorted(path for path in photos.rglob("*.jpg") if path.is_file())
    if not paths:
        raise click.UsageError(
            f"{photos} contains no .jpg files; choose another directory"
        )
    used = list(itertools.islice(itertools.cycle(paths), images))
    report = bench_build(used, model, device=device)
    _finish(report, list(report_lines(report)))


@bench.command("rerank")
@option("--model", _EXISTING)
@option("--index", _EXISTING)
@score_option
@option("--pool", POSITIVE, default=100)
@option("--device", default="auto", metavar="NAME")
@dtype_option
@json_option
def rerank_command(**options: Any) -> None:
    """Measure the joint encoder in pairs per second, and the duration of each stage of
    a query.

    \b
    Examples:
      edje-index bench rerank --model model/ --index photos.edje
      edje-index bench rerank --index photos.edje --score logit

    Options:
        --model: Directory of the model bundle.  [default: random weights with the sizes
            of MiniLM-L12]
        --index: Index to search. Each stage of a query is then measured, too.
        --pool: Number of candidates per query.
        --device: Device that runs the model: auto, cpu, cuda or cuda:N.
    """
    from benchmarks.rerank import bench_rerank, report_lines

    report = bench_rerank(**options)
    _finish(report, list(report_lines(report)))


@bench.command("serve")
@click.argument("index", type=PATH)
@option("--queries", FILE, required=True)
@model_option
@option("--pool", POSITIVE, key="pools", multiple=True, default=(100,))
@option("--seconds", click.FloatRange(1), default=20.0)
@_report_option
@json_option
def serve_command(
    index: Path, queries: Path, report: Path | None, **options: Any
) -> None:
    """Measure the latency of `edje-index serve` under increasing load.

    The report also gives the highest load that the service keeps up with.

    Searches are sent at random times (a Poisson process) and do not wait for earlier
    responses. The latency is measured from the planned time of a search.

    \b
    Examples:
      edje-index bench serve photos.edje --queries captions.txt
      edje-index bench serve photos.edje --queries captions.txt \\
        --pool 10 --pool 100 --pool 1000 --report out

    Options:
        --queries: Text file with one query per line, or .jsonl file with the key
            `query`.
        --pool: Number of candidates per search; repeatable.
        --seconds: Duration of each measurement in seconds.
    """
    with name_missing_extra("serve"):
        from benchmarks.serve import bench_serve, report_lines
    from edje_index.search.query import read_queries

    result = bench_serve(index, read_queries(queries), note, **options)
    _finish(result, list(report_lines(result)), report, "serve")


@bench.command("end-to-end")
@click.argument("index", type=PATH)
@click.argument("captions", type=PATH)
@images_option
@model_option
@option("--folder", PATH, required=True)
@option("--queries", POSITIVE, default=200)
@_report_option
@json_option
def end_to_end_command(
    index: Path, captions: Path, report: Path | None, **options: Any
) -> None:
    """Compare whole search systems on the same images: recall, latency, memory and
    bytes per image.

    All systems get the embeddings and tokens of INDEX. The queries are the captions in
    the file CAPTIONS. If a system is not installed or fails, the report names it with
    the reason, and the other systems are measured.

    The systems rank by late interaction: this package in four precisions, and FAISS
    with each library of `bench fetch`.

    \b
    Example:
      edje-index bench end-to-end photos.edje captions.jsonl \\
        --folder /mnt/nvme/scratch --report out

    Options:
        --folder: Directory for the files of all systems, which are removed at the end.
        --queries: Number of captions to search for.
    """
    from benchmarks.end_to_end import bench_end_to_end, report_lines

    result = bench_end_to_end(index, captions, say=note, **options)
    _finish(result, list(report_lines(result)), report, "end-to-end")


@bench.command("paper")
@click.argument("experiments", metavar="[EXPERIMENT]...", nargs=-1)
@option("--data", _EXISTING, required=True)
@option("--out", PATH, required=True)
@option("--config", _EXISTING)
@option("--model")
@option("--commands", bool, key="listing")
@json_option
def paper_command(
    experiments: tuple[str, ...],
    listing: bool,
    model: str | None,
    **options: Any,
) -> int:
    """Repeat the tables and figures of the EDJE paper, and compare the results with the
    published values.

    Without EXPERIMENT, the command lists the experiments or, if --model is given, runs
    those that need no training. 'all' runs every experiment.
    To continue after an interruption, run the same command again: finished models and
    indexes in --out are used again.

    If data for a row are missing, the table says which files to put where. If no row
    could be measured, the exit code is 1.

    \b
    Examples:
      edje-index bench paper --data data --out study
      edje-index bench paper tokens --data data --out study --commands
      edje-index bench paper all --data data --out study
      edje-index bench paper --model edje --data data --out study

    Options:
        --data: Directory of the data sets, towers and language models.
        --out: Directory for models, indexes and tables.
        --config: TOML file with settings for all training runs.
        --model: Measure this trained model of 64 tokens, without training: the
            directory of a bundle, or a model of 'model get', such as edje.
        --commands: Print the remaining commands without running them.
    """
    from benchmarks.paper.experiments import (
        EXPERIMENTS,
        OF_A_MODEL,
        report_lines,
        run_experiments,
    )
    from benchmarks.paper.study import Study
    from pipelines.jobs.hub import find_model

    names = tuple(EXPERIMENTS) if experiments == ("all",) else experiments
    if model is not None:
        names = names or OF_A_MODEL
        options["model"] = find_model(model, note)
    for name in names:
        if name not in EXPERIMENTS:
            raise click.UsageError(
                f"there is no experiment '{name}': choose from"
                f" {', '.join(EXPERIMENTS)}, or 'all'"
            )
    if not names:
        _finish(
            {"experiments": list(EXPERIMENTS)},
            [f"{name:16} {each.title}" for name, each in EXPERIMENTS.items()],
        )
        return 0
    study = Study(
        say=lambda line: click.echo(line, err=not listing), listing=listing, **options
    )
    reports = run_experiments(names, study)
    if listing:
        return 0
    _finish(
        reports,
        [line for report in reports.values() for line in (*report_lines(report), "")],
    )
    return (
        1 if all(report["state"] == "needs data" for report in reports.values()) else 0
    )
