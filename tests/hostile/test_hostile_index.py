"""Indexes that a stranger made: each is one clear error in bounded memory and time,
whatever opens it.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edje_index.bundles.info import read_bundle_info
from edje_index.errors import ModelError
from pipelines import delete_rows
from pipelines.jobs.quantize import add_ann
from pipelines.jobs.snapshots import remove_snapshots
from storage_formats import CorruptIndexError, TokenStore
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest
from storage_formats.format.places import Directory
from storage_formats.format.rows import ROW_SCHEMA
from tests.conftest import ann_path, environment, rows_path, write_random_index

SPEC = IndexSpec(40, 32, (2, 4), 12)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound") / "index"
    write_random_index(root, SPEC)
    add_ann(root)
    delete_rows(root, [3])
    remove_snapshots(root, 1)
    return root


@pytest.fixture
def layout(sound, tmp_path):
    """An index that a test may damage."""
    return Directory(shutil.copytree(sound, tmp_path / "index"))


@pytest.fixture(scope="module")
def opened(sound):
    """What each way to open an index gives, in a process of its own with little
    memory.
    """
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.open_index", str(sound)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), **one_thread},
    ) as process:

        def call(layout):
            print(layout.root, file=process.stdin, flush=True)
            outcomes = json.loads(process.stdout.readline())
            assert set(outcomes) == {*SOUND}, outcomes
            return outcomes

        yield call


def commit(layout, *changed, **spec):
    """Write `index.json` with other sizes, and with the true checksums of the
    changed files.
    """
    manifest = Manifest.load(layout.root)
    entries = {layout.relative(path): FileEntry.of(layout, path) for path in changed}
    rows = spec.get("rows", SPEC.rows)
    replace(
        manifest,
        spec=replace(SPEC, **spec),
        counts=replace(manifest.counts, inputs=rows, indexed=rows),
        rows_files=tuple(
            replace(each, file=entries.get(each.file.path, each.file))
            for each in manifest.rows_files
        ),
    ).write(layout)


SOUND = {
    "verify": [],
    "fetch": [2, 2, 4],
    "rows": 2,
    "embeddings": [1, 12],
    "ann": 40,
}


def test_a_sound_index_opens(opened, layout):
    assert opened(layout) == SOUND


FILES = {
    "tokens": (lambda layout: layout.token_shard("bf16", 0), "fetch"),
    "embeddings": (lambda layout: layout.embedding_shard(0), "embeddings"),
    "rows": (lambda layout: rows_path(layout.root), "rows"),
    "ann": (lambda layout: ann_path(layout.root), "ann"),
    "deleted rows": (
        lambda layout: layout.root / Manifest.load(layout.root).snapshot.deleted.path,
        "fetch",
    ),
    "manifest": (lambda layout: layout.manifest, "fetch"),
    "metadata": (lambda layout: layout.root / "tokens/zarr.json", None),
    "checksums": (lambda layout: layout.checksums("bf16", 0), "fetch"),
}
"""A file of each kind, and a way to open the index that reads it."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "enormous"])
def test_only_regular_files_inside_the_index_are_opened(opened, layout, name, kind):
    path_of, reader = FILES[name]
    path = path_of(layout)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "enormous":
        path.touch()
        os.truncate(path, 64 << 30)
    else:
        path.symlink_to("/dev/zero")
    outcomes = opened(layout)
    assert path.name in str(outcomes["verify"])
    if reader:
        assert outcomes[reader].startswith("CorruptIndexError"), outcomes[reader]
    if kind != "enormous":
        expected = "not a regular file" if kind == "fifo" else "outside the directory"
        assert expected in str(outcomes["verify"])


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
    if parts == "*":
        with pytest.raises(ModelError, match=expected):
            read_bundle_info(root)


def test_a_stray_link_is_reported(opened, layout):
    (layout.rows / "99999999.parquet").symlink_to("/dev/zero")
    assert opened(layout)["verify"] == [
        ["rows/99999999.parquet", "does not belong to this index; delete it"]
    ]


@pytest.mark.parametrize(
    ("sizes", "reader"),
    [
        ({"rows": 10**9, "shard_size": 10**9}, "fetch"),
        ({"rows": 10**12}, "fetch"),
        ({"rows": 10**12, "shard_size": 1}, "fetch"),
        ({"block_shape": (10**5, 10**5)}, "fetch"),
        ({"embed_dim": 10**9}, "embeddings"),
    ],
    ids=str,
)
def test_claimed_sizes_take_no_memory(opened, layout, sizes, reader):
    commit(layout, **sizes)
    outcomes = opened(layout)
    assert outcomes["verify"]
    assert outcomes[reader].startswith("CorruptIndexError"), outcomes[reader]


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
    first = pa.nulls(rows, pa.int8()).fill_null(0)
    text = pa.DictionaryArray.from_arrays(first, ["x" * text_bytes])
    filled = {"row_id": first.cast(pa.int64()), "uri": text, "status": text}
    columns = [
        filled.get(field.name, pa.nulls(rows, field.type)) for field in ROW_SCHEMA
    ]
    table = pa.table(columns, names=ROW_SCHEMA.names)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20
    commit(layout, path)
    outcomes = opened(layout)
    assert "the Parquet file is damaged" in outcomes["rows"]
    assert f"{path.name}', 'cannot be read" in str(outcomes["verify"])
