"""An `index.json` with a valid checksum and senseless members is damage, in one
clear error.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
from dataclasses import replace
from functools import partial

import pytest

from pipelines import copy_index, delete_rows
from storage_formats import (
    CorruptIndexError,
    Manifest,
    TokenStore,
    UsageError,
    verify_index,
)
from storage_formats.format.checksum import json_checksum
from storage_formats.format.directory import Directory
from storage_formats.format.layout import IndexSpec, Segment
from tests.conftest import write_random_index

SPEC = IndexSpec(5, 4, (4, 16), 6)
ENTRY = {"path": "manifest/shards-0000000a.parquet", "bytes": 99, "crc32c": "0000000a"}
# all members that `index.json` can have
EVERYTHING = {
    "snapshot": {
        "number": 3,
        "change": {},
        "next_shard": 2,
        "oldest": 1,
        "deleted": ENTRY,
        "deleted_rows": 1,
    },
    "offset": {"crc32c": 10, "precisions": ["bf16"]},
    "segments": [{"first_row": 0, "rows": 5}],
    "shard_tables": [ENTRY],
    "columns": [{"name": "text", "kinds": ["text"], "values": 3}],
    "rows_files": [{"first_shard": 0, "file": ENTRY}],
    "removed": ENTRY,
    "counts": {"inputs": 5, "indexed": 3, "duplicates": 1, "failed": {"empty": 1}},
    "ann": {
        "kind": "flat",
        "vectors": 5,
        "probes": 1,
        "candidates": 2,
        "recall": {"k": 10, "value": 0.9, "target": 0.9},
        "files": [{**ENTRY, "vectors": 5}],
    },
}


@pytest.fixture
def root(tmp_path):
    write_random_index(tmp_path, SPEC)
    return tmp_path


def change(root, **members):
    value = {**json.loads((root / "index.json").read_text()), **members}
    (root / "index.json").write_text(
        json.dumps({**value, "crc32c": json_checksum(value)})
    )


@pytest.mark.parametrize(
    "members",
    [
        {"counts": {**EVERYTHING["counts"], "failed": []}},
        {"counts": []},
        {"shard_tables": []},
        {"snapshot": "x"},
        {"snapshot": {**EVERYTHING["snapshot"], "change": [1]}},
        {"snapshot": {**EVERYTHING["snapshot"], "deleted": {"path": 1}}},
        {"ann": {"kind": "flat", "files": 5}},
        {"precisions": [{"name": "bf16"}]},
        {"precisions": {}},
        {"precisions": []},
        {"block_shape": [4, 16, 1]},
        {"offset": {"crc32c": 1, "precisions": ["fp8"]}},
        {"encoded_from": {"bf16": 5}},
    ],
)
def test_senseless_members_are_damage(root, members):
    change(root, **members)
    with pytest.raises(CorruptIndexError, match="is damaged"):
        Manifest.load(root)
    assert [problem.code for problem in verify_index(root)] == ["manifest"]


def integers(value, *path):
    """The path of each integer in `value`, which is JSON."""
    if type(value) is int:
        yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from integers(each, *path, key)


def test_a_number_that_cannot_be_a_count_is_damage(root):
    change(root, **EVERYTHING)
    whole = json.loads((root / "index.json").read_text())
    Manifest.load(root)
    members = list(integers(whole))
    assert len(members) == 28
    for *path, last in members:
        for wrong in (-1, 10**30, True, 1.5, "1", []):
            value = copy.deepcopy(whole)
            functools.reduce(operator.getitem, path, value)[last] = wrong
            data = json.dumps({**value, "crc32c": json_checksum(value)}).encode()
            with pytest.raises(CorruptIndexError, match="is damaged"):
                Manifest.parse(data, "index.json")


def test_counts_that_do_not_add_up_name_the_file(root):
    change(root, counts={"inputs": 5, "indexed": 5, "duplicates": 1, "failed": {}})
    with pytest.raises(CorruptIndexError, match=r"index\.json .* = 6, not 5"):
        Manifest.load(root)


@pytest.mark.parametrize("name", ["fp16", "mxfp8"])
def test_a_precision_that_was_removed_is_named(root, name):
    change(root, precisions=["bf16", name])
    with pytest.raises(UsageError, match=rf"'{name}' was removed; .* 0\.1\.0"):
        TokenStore.open(root)


@pytest.mark.parametrize("name", ["../../x", "/abs", "..", "fp8/../bf16"])
def test_a_precision_cannot_name_another_place(root, name, tmp_path_factory):
    change(root, precisions=["bf16", name])
    out = tmp_path_factory.mktemp("out") / "copy"
    for job in (
        verify_index,
        partial(delete_rows, rows=[1]),
        partial(copy_index, out=out),
    ):
        with pytest.raises(UsageError, match="unknown precision"):
            job(root)


def test_a_gap_that_takes_too_much_memory_is_damage(root):
    manifest = Manifest.load(root)
    far = 4 * (1 << 30)
    segments = (Segment(0, 4), Segment(far, 1))
    spec = replace(manifest.spec, rows=far + 1, segments=segments)
    tables = 2 * manifest.shard_tables
    replace(manifest, spec=spec, shard_tables=tables).write(Directory(root))
    with pytest.raises(CorruptIndexError, match="is out of range"):
        Manifest.load(root)
