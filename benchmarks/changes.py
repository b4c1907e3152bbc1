"""Measures what changes of an index cost: an append beside a build, and reads after a deletion.

    python -m benchmarks.changes append photos --model model --scratch /mnt/nvme/scratch
    python -m benchmarks.changes delete --scratch /mnt/nvme/scratch

`append` builds an index of photos, appends 1 % more, and then a single photo. Each command is a process of its own. The
benchmark holds a snapshot open, which must not change.

`delete` deletes 10 % of the rows of synthetic indexes. In one process, reads of the snapshots before and after the
deletion alternate. A ratio is the median of (seconds before the deletion / seconds after the deletion).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deletion import DeletionBench, deletion_lines
from benchmarks.process_tree import measure_in_new_process
from storage_formats.errors import EdjeError, UsageError
from storage_formats.token_store import TokenStore

_SHARE = 100  # one photo is appended for this many photos of the build
_STEPS = ("build", "append", "append of one photo")


@dataclass(frozen=True)
class AppendBench:
    """Settings of `bench_append`.

    Attributes:
        photos: directory of JPEG images.
        model: directory of the model bundle.
        scratch: directory for a temporary directory, which holds the index.
        images: number of images to build from; 1 % of this number is appended.
        repeats: number of rounds.
        engine: execution engine of the build and the append.
    """

    photos: Path
    model: Path
    scratch: Path
    images: int = 2000
    repeats: int = 3
    engine: str = "inline"


def bench_append(bench: AppendBench) -> list[dict[str, dict[str, Any]]]:
    """Return the cost of every step in every round; see `process_tree.Cost`.

    Raises:
        UsageError: there are too few photos.
        EdjeError: a command failed, an open snapshot changed, or the current snapshot lacks a row.
    """
    photos = sorted(path.absolute() for path in bench.photos.rglob("*.jpg") if path.is_file())
    counts = (bench.images, max(1, bench.images // _SHARE), 1)
    if len(photos) < sum(counts):
        raise UsageError(
            f"{bench.photos} has {len(photos)} files *.jpg, but {sum(counts)} are needed; choose fewer images"
        )
    bench.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench.scratch, prefix="changes-") as folder:
        lists = []
        for step, count in zip(_STEPS, counts, strict=True):
            lists.append(Path(folder, f"{step}.jsonl"))
            lists[-1].write_text("".join(json.dumps({"path": str(path)}) + "\n" for path in photos[:count]))
            del photos[:count]
        return [_append_round(bench, lists, counts) for _ in range(bench.repeats)]


def _append_round(bench: AppendBench, lists: list[Path], counts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    root = lists[0].parent / "index.edje"
    shutil.rmtree(root, ignore_errors=True)
    options = ["--engine", bench.engine, "--model", str(bench.model), "--quiet", "--json"]
    command = [sys.executable, "-m", "pipelines.cli"]
    costs = {_STEPS[0]: measure_in_new_process([*command, "build", str(lists[0]), "--out", str(root), *options])}
    with TokenStore.open(root) as opened:
        before = _contents(opened)
        for step, images in zip(_STEPS[1:], lists[1:], strict=True):
            costs[step] = measure_in_new_process([*command, "append", str(root), str(images), *options])
        if _contents(opened) != before:
            raise EdjeError(f"an open snapshot of {root} changed during an append; please report this")
    with TokenStore.open(root) as current:
        if len(current.row_ids()) != sum(counts):
            raise EdjeError(f"{root} has {len(current.row_ids())} rows after the appends instead of {sum(counts)}")
    return costs


def _contents(store: TokenStore) -> tuple[list[int], int]:
    """Return the row ids of a store, and a checksum of all blocks."""
    row_ids, checksum = store.row_ids(), 0
    for start in range(0, len(row_ids), 256):
        checksum = zlib.crc32(store.fetch(row_ids[start : start + 256]).tobytes(), checksum)
    return row_ids.tolist(), checksum


def append_lines(rounds: list[dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the medians over all rounds as lines of a Markdown table."""
    yield "| step | seconds | processor seconds | peak MiB | of the build: seconds | processor seconds | memory |"
    yield "|---|---|---|---|---|---|---|"
    for step in _STEPS:
        cells = []
        for key, unit in (("wall", 1), ("cpu", 1), ("peak_largest_rss", 1 << 20)):
            cells.append(f"{statistics.median(costs[step][key] for costs in rounds) / unit:,.1f}")
        for key in ("wall", "cpu", "peak_largest_rss"):
            cells.append(f"{statistics.median(costs[step][key] / costs['build'][key] for costs in rounds):.1%}")
        yield f"| {step} | {' | '.join(cells)} |"


def main() -> None:
    """Run one of the benchmarks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="change", required=True)
    append = commands.add_parser("append", help="Measure an append beside a build.")
    append.add_argument("photos", type=Path, help="Directory of JPEG images.")
    append.add_argument("--model", type=Path, required=True, help="Directory of the model bundle.")
    append.add_argument("--images", type=int, default=2000, help="Images of the build.")
    append.add_argument("--repeats", type=int, default=3, help="Number of rounds.")
    append.add_argument("--engine", choices=["inline", "ray"], default="inline", help="Execution engine.")
    delete = commands.add_parser("delete", help="Measure reads before and after a deletion.")
    delete.add_argument("--fetched", type=int, default=20_000, help="Rows of the index to fetch from.")
    delete.add_argument("--searched", type=int, nargs="+", default=(50_000, 200_000), help="Rows of indexes to search.")
    delete.add_argument("--rounds", type=int, default=41, help="Measurements of each task.")
    delete.add_argument("--cpu", action="store_true", help="Measure processor time, for a machine with other load.")
    for each in (append, delete):
        each.add_argument("--scratch", type=Path, required=True, help="Directory for temporary indexes.")
    arguments = vars(parser.parse_args())
    if arguments.pop("change") == "append":
        lines = append_lines(bench_append(AppendBench(**arguments)))
    else:
        lines = deletion_lines(DeletionBench(**arguments))
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
