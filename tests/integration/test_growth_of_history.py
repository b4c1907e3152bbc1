"""What a change costs must not grow with the number of changes before it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines import append_index, build_index, delete_rows
from storage_formats import verify_index
from storage_formats.change import MOST_SNAPSHOTS
from tests.integration.test_lifecycle import write_photo, write_photos

PAIRS = 300


def seconds(call: Callable[[], object]) -> float:
    """Processor time of `call`."""
    started = time.process_time()
    call()
    return time.process_time() - started


def length(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_three_hundred_appends_and_deletions(tmp_path, tiny_bundle):
    root = tmp_path / "index"
    first = write_photos(tmp_path / "first", [0, 1, 2])
    build_index(first, root, tiny_bundle, engine="inline", threads=1)
    # a full collection would visit the objects of torch, at a random pair
    gc.freeze()
    pairs = []
    nothing = []
    lengths = []

    def change(number: int) -> None:
        folder = tmp_path / f"more-{number}"
        folder.mkdir()
        for photo in (2 * number, 2 * number + 1):
            write_photo(folder / f"{photo}.png", 1000 + photo)

        def pair() -> None:
            result = append_index(root, folder, engine="inline")
            assert result.indexed == 2
            delete_rows(root, [result.first_row])

        pairs.append(seconds(pair))
        known = folder / f"{2 * number + 1}.png"
        nothing.append(seconds(lambda: append_index(root, known, engine="inline")))
        lengths.append(length(root / "snapshots"))

    for number in range(30):
        change(number)
    verified = seconds(lambda: verify_index(root))
    for number in range(30, PAIRS):
        change(number)
    verified_later = seconds(lambda: verify_index(root))

    early, late = np.sum(pairs[10:20]), np.sum(pairs[-10:])
    # index.json grows by 130 bytes per append
    # 1.33 to 1.54 were measured, the last beside other programs
    assert late <= 1.75 * early
    early, late = np.median(nothing[10:20]), np.median(nothing[-10:])
    assert late <= 2 * early + 0.005
    assert verified_later <= 1.5 * PAIRS / 30 * verified
    # between two removals of old snapshots, the folder grows and shrinks
    window = MOST_SNAPSHOTS
    early, late = np.mean(lengths[100 : 100 + window]), np.mean(lengths[-window:])
    assert late <= 1.2 * early * (PAIRS - window / 2) / (100 + window / 2)
