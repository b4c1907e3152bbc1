"""Indexes that a stranger made: each is one clear error in bounded memory and time,
whatever opens it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.bundles.info import read_bundle_info
from edje_index.errors import ModelError
from pipelines import delete_rows
from pipelines.jobs.ann import add_ann
from storage_formats import CorruptIndexError, TokenStore
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest
from storage_formats.format.places import Directory
from storage_formats.format.rows import ROW_SCHEMA
from storage_formats.format.shard_table import read_shard_table, write_shard_table
from tests.conftest import REPO, ann_path, rows_path, write_random_index

SPEC = IndexSpec(40, 32, (2, 4), 12)


@pytest.fixture
def layout(tmp_path):
    root = tmp_path / "index"
    write_random_index(root, SPEC)
    add_ann(root)
    return Directory(root)


@pytest.fixture(scope="module")
def opened():
    """What each way to open an index gives, in a process of its own with little
    memory.
    """
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.open_index"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), **one_thread},
    ) as process:

        def call(layout: Layout) -> dict[str, Any]:
            print(layout.root, file=process.stdin, flush=True)
            outcomes: dict[str, Any] = json.loads(process.stdout.readline())
            assert set(outcomes) == {
                "verify",
                "fetch",
                "rows",
                "embeddings",
                "ann",
            }, outcomes
            return outcomes

        yield call


def commit(layout: Layout, *changed: Path, **spec: Any) -> None:
    """Write `index.json` with other sizes, and with the true checksums of the
    changed files.
    """
    manifest = Manifest.load(layout.root)
    entries = {layout.relative(path): FileEntry.of(layout, path) for path in changed}
    lines = read_shard_table(layout.root, manifest.shard_tables[0])
    files = [(shard, entries.get(file.path, file)) for shard, file in lines]
    counts = replace(
        manifest.counts,
        inputs=spec.get("rows", SPEC.rows),
        indexed=spec.get("rows", SPEC.rows),
    )
    table = write_shard_table(layout, files)
    rows_files = tuple(
        replace(each, file=entries.get(each.file.path, each.file))
        for each in manifest.rows_files
    )
    replace(
        manifest,
        spec=replace(SPEC, **spec),
        counts=counts,
        shard_tables=(table,),
        rows_files=rows_files,
    ).write(layout)


def test_a_sound_index_opens(opened, layout):
    assert opened(layout) == {
        "verify": [],
        "fetch": [2, 2, 4],
        "rows": 2,
        "embeddings": [1, 12],
        "ann": 40,
    }


FILES: dict[str, tuple[Callable[[Layout], Path], str]] = {
    "tokens": (lambda layout: layout.token_shard("bf16", 0), "fetch"),
    "embeddings": (lambda layout: layout.embedding_shard(0), "embeddings"),
    "rows": (lambda layout: rows_path(layout.root), "rows"),
    "ann": (lambda layout: ann_path(layout.root), "ann"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "outside"])
def test_only_regular_files_inside_the_index_are_opened(
    opened, layout, tmp_path, name, kind
):
    path_of, reader = FILES[name]
    path = path_of(layout)
    path.rename(tmp_path / "original")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "original")
    outcomes = opened(layout)
    assert outcomes[reader].startswith("CorruptIndexError"), outcomes[reader]
    expected = "not a regular file" if kind == "fifo" else "leads outside the directory"
    # a FIFO has length 0, which is found first
    if name != "tokens" or kind != "fifo":
        assert expected in outcomes[reader]
    assert [layout.relative(path), f"cannot be read: {expected}"] in [
        [where, message.partition(";")[0].partition(", to")[0]]
        for where, message in outcomes["verify"]
    ]


@pytest.mark.parametrize("parts", ["*", "*/*", "*/*/*"])
@pytest.mark.parametrize("has_targets", [True, False])
def test_links_to_another_place_are_named_with_what_helps(
    layout, tmp_path, parts, has_targets
):
    """As in the cache of the Hub or of git-annex, and of folders on another disk."""
    root = layout.root
    (root / "bundle.json").write_text("{}")
    for number, path in enumerate(root.glob(parts)):
        path.rename(tmp_path / f"{number}")
        path.symlink_to(tmp_path / f"{number}" if has_targets else tmp_path / "gone")
    expected = "leads outside .*cp -rL" if has_targets else "which does not exist; get"
    with pytest.raises(CorruptIndexError, match=expected) as caught:
        TokenStore.open(root).fetch([0])
    assert caught.value.remedy is None
    assert "backup" not in str(caught.value)
    if parts == "*":
        with pytest.raises(ModelError, match=expected) as refused:
            read_bundle_info(root)
        assert "restore" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["index.json", "manifest", "tokens/zarr.json", "checksums/bf16/00000000.crc32c"],
)
def test_a_fifo_for_any_other_file_is_reported(opened, layout, name):
    path = (
        next((layout.root / "manifest").iterdir())
        if name == "manifest"
        else layout.root / name
    )
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in str(opened(layout)["verify"])


def test_a_stray_link_is_reported(opened, layout):
    (layout.rows / "99999999.parquet").symlink_to("/dev/zero")
    assert opened(layout)["verify"] == [
        ["rows/99999999.parquet", "does not belong to this index; delete it"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "device", "enormous"])
def test_a_hostile_list_of_deleted_rows_is_reported(opened, layout, kind):
    delete_rows(layout.root, [3])
    path = next((layout.root / "manifest").glob("deleted-*"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 64 << 30)
    outcomes = opened(layout)
    assert layout.relative(path) in [where for where, _ in outcomes["verify"]]
    for reader in ("fetch", "rows", "ann"):
        assert outcomes[reader].startswith(
            "CorruptIndexError: cannot read the file of deleted rows"
        ), outcomes[reader]


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 10**9, "shard_size": 10**9},
        {"rows": 10**12},
        {"rows": 10**12, "shard_size": 1},
        {"shard_size": 10**9},
        {"block_shape": (10**5, 10**5)},
        {"embed_dim": 10**9},
    ],
    ids=str,
)
def test_claimed_sizes_take_no_memory(opened, layout, sizes):
    commit(layout, **sizes)
    outcomes = opened(layout)
    assert outcomes["verify"]
    reader = "embeddings" if "embed_dim" in sizes else "fetch"
    assert outcomes[reader].startswith("CorruptIndexError"), outcomes[reader]


@pytest.mark.parametrize("name", ["tokens", "embeddings"])
def test_a_file_of_many_gigabytes_takes_no_memory(opened, layout, name):
    path = FILES[name][0](layout)
    os.truncate(path, 64 << 30)
    outcomes = opened(layout)
    assert [layout.relative(path), "has 68719476736 bytes instead of"] in [
        [where, message.partition(" the ")[0]] for where, message in outcomes["verify"]
    ]
    assert outcomes[FILES[name][1]].startswith("CorruptIndexError")


@pytest.mark.parametrize(
    ("rows", "text_bytes"),
    [pytest.param(5_000_000, 1, marks=pytest.mark.slow), (40, 30 << 20)],
    ids=["many rows", "long text"],
)
def test_a_small_rows_table_takes_no_memory(opened, layout, rows, text_bytes):
    """Parquet stores a value that repeats once, however long it is and however
    often it repeats.
    """
    path = rows_path(layout.root)
    numbers = (
        pa.nulls(rows, pa.int64()).fill_null(0)
        if rows > SPEC.rows
        else pa.array(range(rows), pa.int64())
    )
    text = pa.DictionaryArray.from_arrays(
        pa.nulls(rows, pa.int8()).fill_null(0), ["x" * text_bytes]
    )
    filled = {"row_id": numbers, "uri": text, "status": text}
    columns = [
        filled.get(field.name, pa.nulls(rows, field.type)) for field in ROW_SCHEMA
    ]
    pq.write_table(
        pa.table(columns, names=ROW_SCHEMA.names),
        path,
        compression="zstd",
        store_schema=False,
    )
    assert path.stat().st_size < 1 << 20
    commit(layout, path)
    outcomes = opened(layout)
    assert "the Parquet file is damaged" in outcomes["rows"]
    assert [layout.relative(path), "cannot be read"] in [
        [where, message.partition(":")[0]] for where, message in outcomes["verify"]
    ]
