"""`edje-index bench fetch`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.commands.output import json_option, show

if TYPE_CHECKING:
    from benchmarks.fetch.workloads import CacheState


@click.command("fetch")
@click.argument("index", required=False, type=click.Path(path_type=Path))
@click.option("--synthetic", type=click.IntRange(min=2), metavar="N", help="Make an index of N random rows instead.")
@click.option("--precision", "precisions", multiple=True, metavar="NAME", help="May be repeated.  [default: the first]")
@click.option(
    "--pool",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    help="Blocks of a large fetch, at most half the rows.",
)
@click.option("--cold", "state", flag_value="cold", help="Only with an empty page cache.  [default: cold and warm]")
@click.option("--warm", "state", flag_value="warm", help="Only from the page cache.")
@click.option("--peers", is_flag=True, help="Other readers too, on copies of the same blocks.")
@click.option(
    "--engine", "engines", multiple=True, metavar="NAME", help="I/O engine; may be repeated.  [default: auto]"
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of everything.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Longest run of a peer, by fewer blocks.")
@click.option("--memory-cap", type=click.IntRange(min=1), metavar="BYTES", help="Also with only so much memory left.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Bundle: what its joint encoder needs.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder for copies.  [default: beside INDEX]")
@click.option("--keep", is_flag=True, help="Leave what was written to the scratch folder.")
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), help="Write Markdown, PNG and JSON there.")
@json_option
def fetch_command(
    index: Path | None,
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
    as_json: bool,
) -> None:
    """How fast blocks of INDEX come off its disk, beside the disk itself. Linux only.

    Every run is a process of its own; cold runs are checked to be cold. The device's own rate is measured by fio, where
    it is installed, on the same files in turn with everything else.

    \b
    Examples:
      edje-index bench fetch photos.edje
      edje-index bench fetch --synthetic 100000 --precision fp8 --peers --scratch /mnt/nvme --report out
    """
    if (index is None) == (synthetic is None):
        raise click.UsageError("name an INDEX, or give --synthetic and a number of rows")
    if scratch is None and index is None:
        raise click.UsageError("--synthetic needs --scratch, a folder on the disk to measure")
    _check_engines(engines)
    from benchmarks.fetch.bench import bench_fetch
    from benchmarks.fetch.plan import FetchBench
    from benchmarks.fetch.report import describe, write_report

    place = scratch or (index or Path()).resolve().parent
    bench = FetchBench(
        scratch=place,
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
    )
    with _interrupted_by_sigterm():
        found = bench_fetch(bench, lambda line: click.echo(line, err=True))
    if report is not None:
        for path in write_report(found, report):
            click.echo(f"wrote {path}", err=True)
    show(found, as_json, describe(found))


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that copies are removed and workers ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_engines(names: tuple[str, ...]) -> None:
    from storage_formats.reading import engines

    for name in names:
        if name not in ("auto", *engines()):
            raise click.UsageError(f"no engine '{name}' here; there are: auto, {', '.join(engines())}")
