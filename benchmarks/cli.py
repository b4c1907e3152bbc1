"""The command group `edje-index bench`: the options of each benchmark, and the
printing of its results.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from pipelines.cli.options import (
    FILE,
    PATH,
    POSITIVE,
    Command,
    device_option,
    json_option,
    model_option,
    option,
    precision_name,
    stored_precisions_option,
)
from pipelines.cli.output import note, wants_json
from storage_formats.format.layout import SHARD_SIZE, IndexSpec

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_PARTS = ["limits", "decode", "score", "pool", "search", "train"]
_report_option = click.option(
    "--report",
    "report_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the report, in Markdown and JSON, with a picture.",
)


@click.group()
def bench() -> None:
    """Run a benchmark: fetching, building, searching, a GPU, or the tables of the
    paper.

    Results are medians over several runs. From machine to machine, ratios vary less
    than durations.
    """


bench.command_class = Command


def _print(report: dict[str, Any], lines: Iterable[str]) -> None:
    """Print a report as one JSON object with --json, otherwise as `lines`."""
    # `print_json` would sort the keys. Here they keep the order of the measurements.
    text = json.dumps(report, default=str) if wants_json() else "\n".join(lines)
    click.echo(text)


def _run(
    benchmark: Callable[..., dict[str, Any]], *arguments: Any, **options: Any
) -> int:
    """Run a benchmark and print its report. Return 1 if a run failed or if its result
    was wrong.
    """
    from benchmarks.report import report_lines

    # SIGTERM raises KeyboardInterrupt, which also ends the process of the current run.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = benchmark(*arguments, note, **options)
    finally:
        signal.signal(signal.SIGTERM, before)
    _print(report, report_lines(report))
    problems = [[row["case"], *row["problems"]] for row in report["rows"]]
    return int(any(word in str(problems) for word in ("'failed'", "WRONG")))


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

    names = tuple(dict.fromkeys(precisions))
    spec = IndexSpec(rows, SHARD_SIZE, (64, 384), embed_dim=384, precisions=names)
    make_synthetic(out, spec)
    report = {"index": str(out), "rows": rows, "shards": spec.shards}
    _print(report, [f"{rows} rows in {spec.shards} shards"])


@bench.command("fetch")
@click.argument("index", type=PATH)
@option("--precision", precision_name, key="precisions", multiple=True)
@option("--pool", POSITIVE, default=50_000)
@option("--quick", bool)
@option("--paper", bool)
@option("--repeats", POSITIVE, default=5)
@_report_option
@json_option
def fetch_command(index: Path, **options: Any) -> int:
    """Measure how fast blocks of INDEX are fetched, and compare the rate with the disk
    and with other libraries. Linux only.

    The first lines say how long the benchmark takes. The libraries of the extra `bench`
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
        --quick: Take about three minutes on an idle machine: fewer runs, other
            libraries at one precision only, and only the first GiB of the index, which
            may fit in a cache of the drive.
        --paper: Repeat only the test of the EDJE paper: 50,000 of 100,000 blocks,
            contiguous and random.
        --repeats: Number of runs of each measurement.
    """
    from benchmarks.fetch import bench_fetch

    return _run(bench_fetch, index, **options)


@bench.command("build")
@click.argument("photos", type=_FOLDER)
@option("--model", _FOLDER)
@option("--images", POSITIVE, default=1000)
@option("--device", click.Choice(["cpu", "cuda"]), default="cpu")
@_report_option
@json_option
def build_command(photos: Path, **options: Any) -> int:
    """Compare builds with a loop that decodes, resizes and encodes photos in one
    thread. Linux only.

    Without --model, the model costs nothing. The benchmark then measures how many
    photos per second are prepared, which is the highest rate that any model can reach.
    With --model, both engines are measured.

    \b
    Examples:
      edje-index bench build ~/photos
      edje-index bench build ~/photos --model model/ --images 2000

    Options:
        --model: Directory of the model bundle.  [default: a model that costs nothing]
        --images: Number of images to index. If PHOTOS has fewer images, images are used
            several times.
        --device: Device that runs the model.
    """
    from benchmarks.build import bench_build

    return _run(bench_build, photos, **options)


@bench.command("search")
@click.argument("index", type=PATH)
@option("--queries", FILE)
@model_option
@option("--pool", POSITIVE, key="pools", multiple=True, default=(100,))
@option("--only", click.Choice(["rerank", "late", "serve"]), multiple=True)
@option("--seconds", click.FloatRange(1), default=10.0)
@device_option
@_report_option
@json_option
def search_command(index: Path, queries: Path | None, **options: Any) -> int:
    """Measure searches of INDEX: the joint encoder in pairs per second, the stages of a
    query, late interaction beside other libraries, and the service under load. Linux
    only.

    In late interaction, this package is measured in every stored precision, and FAISS
    with each library of `bench fetch`. For the service, the load grows until the
    service does not keep up with it. Searches are sent at random times (a Poisson
    process) and do not wait for earlier responses.

    \b
    Examples:
      edje-index bench search photos.edje --queries captions.txt
      edje-index bench search photos.edje --only rerank
      edje-index bench search photos.edje --queries captions.txt \\
        --pool 20 --pool 100 --report out

    Options:
        --queries: Text file with one query per line, or .jsonl file, for the service.
        --pool: Number of candidates per query; repeatable.
        --only: Measure only this workload; repeatable.  [default: all]
        --seconds: Duration of each load of the service in seconds.
    """
    from benchmarks.search import bench_search
    from edje_index.search.query import read_queries

    texts = read_queries(queries) if queries else []
    return _run(bench_search, index, queries=texts, **options)


@bench.command("gpu")
@click.argument("photos", type=_FOLDER)
@option("--part", click.Choice(_PARTS), key="parts", multiple=True)
@option("--seconds", click.FloatRange(1), default=540.0)
@option("--tiny", bool)
@_report_option
@json_option
def gpu_command(photos: Path, **options: Any) -> int:
    """Check whether the results on a GPU are right, and measure how near the rates come
    to the limits of the device.

    Models have the sizes of the EDJE paper and random weights, so no model files are
    needed. Each result is printed and saved as soon as it is measured. If a part fails,
    the next part still runs. Without a GPU, everything runs on the CPU, and the report
    says so.

    \b
    Examples:
      edje-index bench gpu ~/photos --report out
      edje-index bench gpu ~/photos --tiny

    Options:
        --part: Run only this part; repeatable.  [default: all, and builds]
        --seconds: Time limit. A part that needs more than what is left is skipped.
        --tiny: Rehearse with small models, which are fast enough for a CPU.
    """
    from benchmarks.gpu import bench_gpu

    return _run(bench_gpu, photos, **options)


@bench.command("paper")
@click.argument("experiments", metavar="[EXPERIMENT]...", nargs=-1)
@option("--data", _FOLDER, required=True)
@option("--out", PATH, required=True)
@option("--config", FILE)
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

    'all' runs every experiment. With --model and without EXPERIMENT, the command runs
    those that need no training.
    To continue after an interruption, run the same command again: finished models and
    indexes in --out are used again.

    If data for a row are missing, the table says which files to put where. If no row
    could be measured, the exit code is 1.

    \b
    Examples:
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
        run_experiments,
        table_lines,
    )
    from benchmarks.paper.study import Study
    from pipelines.jobs.hub import find_model

    names = tuple(EXPERIMENTS) if experiments == ("all",) else experiments
    if model is not None:
        names = names or OF_A_MODEL
        options["model"] = find_model(model, note)
    if not names or set(names) - set(EXPERIMENTS):
        raise click.UsageError(f"choose from {', '.join(EXPERIMENTS)}, or 'all'")
    study = Study(
        say=lambda line: click.echo(line, err=not listing), listing=listing, **options
    )
    reports = run_experiments(names, study)
    if not listing:
        tables = [*map(table_lines, reports.values())]
        _print(reports, [line for lines in tables for line in (*lines, "")])
    states = {report["state"] for report in reports.values()}
    return int(not listing and states == {"needs data"})
