"""Measures how much checksum verification slows down fetches.

    python -m benchmarks.checked_reads --scratch /mnt/nvme/scratch
    python -m benchmarks.checked_reads --scratch /mnt/nvme/scratch --cpu --states warm

Fetches with and without verification alternate in one process. Before each cold fetch, the shard files are evicted from
the page cache. The reported ratio is the median of (seconds without verification / seconds with verification).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fetch.page_cache import evict, load
from benchmarks.synthetic import make_synthetic
from storage_formats import IndexSpec, TokenStore
from storage_formats.format.layout import Layout

PRECISIONS = ("bf16", "fp8", "nvfp4")
WARM_UP = 20  # fetches per store before the first measurement


@dataclass(frozen=True)
class Setting:
    """One combination of precision, page cache state and batch size.

    Attributes:
        precision: precision of the store.
        is_cold: True to evict the shard files from the page cache before each fetch.
        batch: number of random rows per fetch.
        rounds: number of rounds. A round is one fetch without and one fetch with verification.
    """

    precision: str
    is_cold: bool
    batch: int
    rounds: int


SETTINGS = {
    "warm": [(4000, 41), (100, 401)],
    "cold": [(4000, 41), (400, 201)],
}
"""Pairs (rows per batch, number of rounds) by state of the page cache."""


def measure(root: Path, setting: Setting, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Return (seconds without verification, seconds with verification) of each round.

    Both fetches of a round read the same rows.
    """
    files = list(Layout(root).token_array(setting.precision).glob("c.*"))
    engine = "io_uring" if setting.is_cold else "auto"
    with (
        TokenStore.open(root, setting.precision, engine, verify_reads=False) as unchecked,
        TokenStore.open(root, setting.precision, engine, verify_reads=True) as checked,
    ):
        batches = _batches(np.random.default_rng(0), len(checked), setting.batch)
        return fetch_alternately((unchecked, checked), files, batches, setting, clock)


def fetch_alternately(
    stores: tuple[TokenStore, TokenStore],
    files: list[Path],
    batches: Iterator[np.ndarray],
    setting: Setting,
    clock: Callable[[], float],
) -> list[tuple[float, float]]:
    """Fetch from two stores in turn. Return the seconds of both for each round.

    Args:
        stores: stores of the same shard files.
        files: the shard files, which are evicted from the page cache or loaded into it.
        batches: row ids of the fetches.
        setting: batch size, state of the page cache and number of rounds.
        clock: function that returns the current time in seconds.
    """
    out = stores[0].empty(setting.batch)  # both stores use it, because its pages affect the speed
    load(files)
    out[:] = 0  # touches all pages, so that fetches cause no page faults
    for store in stores:
        for _ in range(WARM_UP):
            store.fetch(next(batches), out=out)
    seconds = []
    for number, row_ids in zip(range(setting.rounds), batches, strict=False):
        pair = [0.0, 0.0]
        for kind in (0, 1) if number % 2 else (1, 0):
            if setting.is_cold:
                evict(files)
            started = clock()
            stores[kind].fetch(row_ids, out=out)
            pair[kind] = clock() - started
        seconds.append((pair[0], pair[1]))
    return seconds


def _batches(rng: np.random.Generator, rows: int, batch: int) -> Iterator[np.ndarray]:
    while True:
        yield rng.integers(0, rows, batch)


def table_line(setting: Setting, seconds: list[tuple[float, float]]) -> str:
    """Return one line of a Markdown table: median microseconds per block of both kinds of fetch, and the ratio."""
    unchecked, checked = (statistics.median(times) * 1e6 / setting.batch for times in zip(*seconds, strict=True))
    ratio = statistics.median(without / with_check for without, with_check in seconds)
    state = "cold" if setting.is_cold else "warm"
    return f"| `{setting.precision}` | {state} | {setting.batch:,} | {unchecked:.2f} | {checked:.2f} | {ratio:.3f} |"


def main() -> None:
    """Measure fetches with and without verification, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="Directory for an index of random blocks.")
    parser.add_argument("--rows", type=int, default=16_384, help="Rows of the index.")
    parser.add_argument(
        "--states",
        nargs="+",
        choices=list(SETTINGS),
        default=list(SETTINGS),
        help="States of the page cache to measure.",
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--cpu", action="store_true", help="Measure processor time, for a machine with other load.")
    arguments = parser.parse_args()
    root = arguments.scratch / f"checked-reads-{arguments.rows}.edje"
    if not root.exists():
        make_synthetic(root, IndexSpec(arguments.rows, 1024, (64, 384), embed_dim=8, precisions=PRECISIONS))
    clock = time.process_time if arguments.cpu else time.perf_counter
    print(
        "| precision | state | rows per batch | unchecked, us per block | checked | ratio |\n|---|---|---|---|---|---|"
    )
    for precision in arguments.precisions:
        for state in arguments.states:
            for batch, rounds in SETTINGS[state]:
                setting = Setting(precision, state == "cold", batch, rounds)
                print(table_line(setting, measure(root, setting, clock)), flush=True)


if __name__ == "__main__":
    main()
