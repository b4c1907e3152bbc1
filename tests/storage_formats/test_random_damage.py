"""Random damages of single files of an index with several snapshots: `verify` finds
each, and no wrong row is read.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil

import numpy as np
import pytest

from edje_index.search.rows import IndexRows
from pipelines import delete_rows
from storage_formats import (
    EdjeError,
    IndexSpec,
    TokenStore,
    UsageError,
    read_rows,
    verify_index,
)
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import all_files, write_random_index

SPEC = IndexSpec(21, 4, (4, 16), 6, precisions=("bf16", "fp8"))


def damage(path, rng):
    """Damage a file in one of seven ways. Return the way."""
    data = path.read_bytes()
    at, stop = sorted(rng.choices(range(len(data) + 1), k=2))
    bit = bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else b"x"
    ways = {
        "bit": data[:at] + bit + data[at + 1 :],
        "zeros": data[:at] + bytes(stop - at) + data[stop:],
        "noise": data[:at] + rng.randbytes(stop - at) + data[stop:],
        "cut": data[:at],
        "longer": data + rng.randbytes(1 + at),
        "without a part": data[:at] + data[stop:],
        "missing": None,
    }
    way = rng.choice([name for name, damaged in ways.items() if damaged != data])
    path.unlink()
    if way != "missing":
        path.write_bytes(ways[way])
    return way


def tokens(root, name, row):
    with TokenStore.open(root, name) as store:
        return store.fetch([row]).tobytes()


def described(root):
    return IndexRows(CommittedIndex.open(root)).described(np.array([9]), ["status"])


READERS = [
    *(
        functools.partial(tokens, name=name, row=row)
        for name in SPEC.precisions
        for row in (9, 17, 20)
    ),
    lambda root: read_embeddings(CommittedIndex.open(root), [9, 17]).tobytes(),
    lambda root: read_rows(root).to_pylist(),
    described,
]


def read(root):
    """What readers get of each kind of file. An error takes the place of what is
    damaged.
    """
    seen = []
    for reader in READERS:
        try:
            seen.append(reader(root))
        except EdjeError as error:
            seen.append(error)
    return seen


@pytest.mark.parametrize("damages", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_random_damages_are_found_and_give_no_wrong_row(tmp_path, damages):
    sound = tmp_path / "sound"
    copy = tmp_path / "copy"
    write_random_index(sound, SPEC, failed=frozenset({5}))
    delete_rows(sound, rows=[1], erase=True)
    delete_rows(sound, rows=[2])
    right = read(sound)
    assert not any(isinstance(each, Exception) for each in right)
    # the lock has no content
    files = [path for path in sorted(all_files(sound)) if path.name != "lock"]
    rng = random.Random(1)
    refused = 0
    for number in range(damages):
        shutil.copytree(sound, copy)
        where = rng.choice(files)
        way = f"damage {number}, {damage(copy / where, rng)} of {where}"
        # there is no index
        with contextlib.suppress(*[UsageError] if where.name == "index.json" else []):
            assert verify_index(copy), f"{way} was not found"
        errors = 0
        for got, wanted in zip(read(copy), right, strict=True):
            errors += isinstance(got, EdjeError)
            assert got == wanted or isinstance(got, EdjeError), way
        refused += errors > 0
        shutil.rmtree(copy)
    assert refused > damages / 4, "readers met few of the damages"
