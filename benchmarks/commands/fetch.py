"""The command `edje-index bench fetch`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.commands.output import show
from pipelines.cli.options import json_option, location

if TYPE_CHECKING:
    from benchmarks.fetch.plan import FetchBench
    from benchmarks.fetch.workloads import CacheState


@click.command("fetch")
@click.argument("index", required=False, type=location)
@click.option(
    "--synthetic",
    type=click.IntRange(min=2),
    metavar="N",
    help="Number of random rows of a new index, which is measured instead of INDEX.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="NAME",
    help="Precision to measure; repeatable.  [default: first precision of the index]",
)
@click.option(
    "--pool",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    help="Number of blocks per large fetch, limited to half the rows of the index.",
)
@click.option(
    "--cold", "state", flag_value="cold", help="Measure only with a cold page cache.  [default: cold and warm]"
)
@click.option("--warm", "state", flag_value="warm", help="Measure only with all blocks in the page cache.")
@click.option("--peers", is_flag=True, help="Also measure other libraries with the same blocks.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME",
    help="I/O engine to measure; repeatable.  [default: auto]",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Number of runs of each measurement."
)
@click.option(
    "--seconds",
    type=float,
    default=10.0,
    show_default=True,
    help="Target duration of a run of another library, in seconds. A slow library fetches fewer blocks.",
)
@click.option(
    "--memory-cap",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Also measure with only this many bytes of free memory.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Model bundle with the joint encoder whose speed is compared with the fetch rate.",
)
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    help="Directory for temporary files. --synthetic needs this option.  [default: directory that contains INDEX]",
)
@click.option("--keep", is_flag=True, help="Keep the temporary files in --scratch.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the report: Markdown, JSON and plots.",
)
@click.option("--targets", is_flag=True, help="Compare the results with the performance targets of this project.")
@json_option
def fetch_command(
    index: Path | str | None,
    synthetic: int | None,
    precisions: tuple[str, ...],
    pool: int,
    state: CacheState | None,
    peers: bool,
    engines: tuple[str, ...],
    repeats: int,
    seconds: float,
    memory_cap: int | None,
    model: Path | None,
    scratch: Path | None,
    keep: bool,
    report: Path | None,
    targets: bool,
    as_json: bool,
) -> None:
    """Measure how fast blocks of INDEX are fetched, and compare the rate with the speed of the disk. Linux only.

    Each run is a new process. Before a cold run, the command checks that the files are not in the page cache. If fio
    is installed, fio measures the speed of the disk on the same files, alternating with the other runs.

    INDEX may be the URL of an index on an object store. The command then measures the rate of large fetches. For
    queries of 100 blocks, the command measures the latency, the number of requests and the cost. Unless the block cache
    is off or too small, it also measures fetches of cached blocks.

    \b
    Examples:
      edje-index bench fetch photos.edje
      edje-index bench fetch s3://my-bucket/photos.edje --pool 5000 --peers --report out
      edje-index bench fetch --synthetic 100000 --precision fp8 --peers --scratch /mnt/nvme --report out
    """
    if isinstance(index, str):
        _fetch_remote(index, precisions, pool, repeats, peers=peers, report=report, as_json=as_json)
        return
    _check_subject(index, synthetic, scratch, engines)
    from benchmarks.fetch.plan import FetchBench

    bench = FetchBench(
        scratch=scratch or (index or Path()).resolve().parent,
        index=index,
        synthetic=synthetic,
        precisions=tuple(dict.fromkeys(precisions)),
        pool=pool,
        states=(state,) if state else ("cold", "warm"),
        peers=peers,
        engines=tuple(dict.fromkeys(engines)) or ("auto",),
        repeats=repeats,
        seconds=seconds,
        memory_cap=memory_cap,
        model=model,
        keep=keep,
        targets=targets,
    )
    _fetch_local(bench, report, as_json=as_json)


def _fetch_local(bench: FetchBench, report: Path | None, *, as_json: bool) -> None:
    from benchmarks.fetch.bench import bench_fetch
    from benchmarks.fetch.report import describe, write_report

    with _interrupted_by_sigterm():
        result = bench_fetch(bench, lambda line: click.echo(line, err=True))
    if report is not None:
        for path in write_report(result, report):
            click.echo(f"wrote {path}", err=True)
    show(result, as_json, describe(result))


def _check_subject(index: Path | None, synthetic: int | None, scratch: Path | None, engines: tuple[str, ...]) -> None:
    if (index is None) == (synthetic is None):
        raise click.UsageError("give either INDEX or --synthetic N")
    if scratch is None and index is None:
        raise click.UsageError("--synthetic needs --scratch: give a directory on the disk to measure")
    _check_engines(engines)


_REMOTE_OPTIONS = {"index", "precisions", "pool", "repeats", "peers", "report", "as_json"}


def _fetch_remote(
    url: str,
    precisions: tuple[str, ...],
    pool: int,
    repeats: int,
    *,
    peers: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Measure the index at `url`. Raises click.UsageError for options that only apply to a disk."""
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if is_given and option.name not in _REMOTE_OPTIONS:
            raise click.UsageError(
                f"{option.opts[0]} does not apply to an index on an object store; leave out the option"
            )
    from benchmarks.fetch.remote import RemoteBench, bench_remote, describe_remote, write_remote_report

    if len(precisions) > 1:
        raise click.UsageError("an index on an object store is measured in one precision; give --precision once")
    precision = precisions[0] if precisions else None
    result = bench_remote(RemoteBench(url, precision, pool, repeats, peers), lambda line: click.echo(line, err=True))
    if report is not None:
        for path in write_remote_report(result, report):
            click.echo(f"wrote {path}", err=True)
    show(result, as_json, describe_remote(result))


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that the benchmark removes its temporary files."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_engines(names: tuple[str, ...]) -> None:
    from storage_formats.reading import engines

    for name in names:
        if name not in ("auto", *engines()):
            raise click.UsageError(f"engine '{name}' is not available; choose one of: auto, {', '.join(engines())}")
