"""The command group `edje-index bench`: the options of each benchmark, and the
printing of its results.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from pipelines.cli.command import Job, command
from pipelines.cli.output import note, print_result


@click.group()
def bench() -> None:
    """Run a benchmark: fetching, building, searching, a GPU, or the tables of the
    paper.

    Results are medians over several runs. From machine to machine, ratios vary less
    than durations.
    """


def _run(job: Job, **changes: Any) -> Iterable[str]:
    """Run a benchmark and return the lines of its report. The exit code is 1 if a run
    failed or if its result was wrong.
    """
    from benchmarks.harness import FAILURES, report_lines

    # SIGTERM raises KeyboardInterrupt, which also ends the process of the current run.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = job.run(**changes)
    finally:
        signal.signal(signal.SIGTERM, before)
    problems = [problem for row in report["rows"] for problem in row["problems"]]
    job.exit_code = int(any(problem.startswith(FAILURES) for problem in problems))
    # `print_result` escapes line breaks in a line.
    return "\n".join(report_lines(report)).split("\n")


@command(
    "benchmarks.fetch:make_synthetic",
    precisions="--precision",
    block_shape=None,
    shard_size=None,
)
def make_synthetic(job: Job) -> None:
    """Write an index of random blocks to OUT for benchmarks. A block has 64 tokens of
    width 384, as in the EDJE paper.

    \b
    Example:
      edje-index bench make-synthetic /tmp/random.edje --rows 100000

    Args:
        rows: number of rows.
    """


@command(
    "benchmarks.fetch:bench_fetch",
    resume=True,
    report_folder="--report",
    precisions="--precision",
)
def fetch(job: Job) -> Iterable[str]:
    """Measure how fast blocks of INDEX are fetched, and compare the rate with the disk
    and with other libraries. Linux only.

    Each line says how long the rest may take. The libraries of the extra `bench`
    are compared if they are installed. Some libraries need a copy of the blocks, which
    is written beside INDEX and removed at the end. If the command is interrupted, run
    it again to continue.

    \b
    Examples:
      edje-index bench fetch photos.edje --quick
      edje-index bench fetch photos.edje --precision fp8 --report out

    Args:
        precisions: precision to compare with other libraries; repeatable. By default,
            bf16, fp8 and nvfp4 are compared if INDEX stores them. For the other stored
            precisions, only the large fetch of this package is measured.
        pool: number of blocks per large fetch, limited to half the rows of the index.
        quick: compare one precision only, with two runs of each measurement, and read
            only the first GiB of INDEX, which may fit in a cache of the drive.
        repeats: number of runs of each measurement.
        report_folder: directory for the report, in Markdown and JSON.
    """
    return _run(job)


@command("benchmarks.build:bench_build", report_folder="--report", repeats=None)
def build(job: Job) -> Iterable[str]:
    """Compare builds with a loop that decodes, resizes and encodes photos in one
    thread. Linux only.

    Without --model, the model costs nothing. The benchmark then measures how many
    photos per second are prepared, which is the highest rate that any model can reach.
    With --model, both engines are measured.

    \b
    Examples:
      edje-index bench build ~/photos
      edje-index bench build ~/photos --model model/ --images 2000

    Args:
        model: directory of the model bundle. None selects a model that costs nothing.
        images: number of images to index. If there are fewer, images are used several
            times.
        device: device that runs the model.
        report_folder: directory for the report, in Markdown and JSON.
    """
    return _run(job)


@command(
    "benchmarks.search:bench_search",
    resume=True,
    report_folder="--report",
    pools="--pool",
    queries_file="--queries",
    queries=None,
)
def search(job: Job, *, queries_file: Path | None = None) -> Iterable[str]:
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

    Args:
        queries_file: text file with one query per line, or .jsonl file, for the
            service.
        model: directory of the model bundle. None selects the bundle that built INDEX.
        pools: number of candidates per query; repeatable.
        only: measure only this workload: rerank, late or serve; repeatable. If there
            are none, all are measured.
        seconds: duration of each load of the service in seconds.
        device: device that runs the model. auto uses cuda if a CUDA device is
            available.
        report_folder: directory for the report, in Markdown and JSON.
    """
    from edje_index.search.query import read_queries

    return _run(job, queries=read_queries(queries_file) if queries_file else [])


@command(
    "benchmarks.gpu:bench_gpu",
    report_folder="--report",
    parts="--part",
    device=None,
)
def gpu(job: Job) -> Iterable[str]:
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

    Args:
        parts: run only this part: limits, decode, score, pool, search or train;
            repeatable. If there are none, all run, and builds.
        tiny: rehearse with small models, which are fast enough for a CPU.
        report_folder: directory for the report, in Markdown and JSON.
    """
    return _run(job)


@command(listing="--commands")
def paper(
    experiments: Sequence[str] = (),
    *,
    data: Path,
    out: Path,
    config: Path | None = None,
    model: str | None = None,
    listing: bool = False,
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

    Args:
        data: directory of the data sets, towers and language models.
        out: directory for models, indexes and tables.
        config: TOML file with settings for all training runs.
        model: measure this trained model of 64 tokens, without training: the directory
            of a bundle, or a model of 'model get', such as edje.
        listing: print the remaining commands without running them.
    """
    from benchmarks.paper.experiments import (
        EXPERIMENTS,
        OF_A_MODEL,
        Study,
        run_experiments,
        table_lines,
    )
    from pipelines.jobs.hub import find_model

    names = tuple(EXPERIMENTS) if experiments == ("all",) else experiments
    bundle = None
    if model is not None:
        names = names or OF_A_MODEL
        bundle = find_model(model, note)
    if not names or set(names) - set(EXPERIMENTS):
        raise click.UsageError(f"choose from {', '.join(EXPERIMENTS)}, or 'all'")
    # The arguments of a command identify its step, so all paths are absolute. The study
    # then finds its finished steps from any working directory.
    study = Study(
        data.absolute(),
        out.absolute(),
        lambda line: click.echo(line, err=not listing),
        config and config.absolute(),
        listing,
        bundle and bundle.absolute(),
    )
    reports = run_experiments(names, study)
    if not listing:
        tables = map(table_lines, reports.values())
        print_result(reports, (line for lines in tables for line in (*lines, "")))
    states = {report["state"] for report in reports.values()}
    return int(not listing and states == {"needs data"})


for each in (build, fetch, gpu, make_synthetic, paper, search):
    bench.add_command(each)
