"""Copies of an index between directories: what is copied, resumed, and refused."""

import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import JobStopped, copy_index, delete_rows
from storage_formats import (
    CorruptIndexError,
    IncompleteIndexError,
    TokenStore,
    UsageError,
    verify_index,
)
from storage_formats.change import write_array_shapes
from storage_formats.format.manifest import Manifest
from storage_formats.format.places import Directory
from storage_formats.format.shard_table import (
    FileEntry,
    read_shard_table,
    write_shard_table,
)
from tests.command_line import environment
from tests.conftest import all_files, write_random_index
from tests.pipelines.conftest import SMALL


@pytest.fixture
def index(tmp_path):
    write_random_index(tmp_path / "photos.edje", SMALL, failed=frozenset({5}))
    delete_rows(tmp_path / "photos.edje", rows=[3])
    return tmp_path / "photos.edje"


def contents(root):
    """The bytes of every file of an index, without earlier snapshots and the lock."""
    return {
        path.as_posix(): data
        for path, data in all_files(root).items()
        if {"snapshots", "lock"}.isdisjoint(path.parts)
    }


def check_equal(index, url):
    """The index at `url` has the same files as the directory `index`."""
    back = Path(tempfile.mkdtemp(dir=index.parent)) / "back"
    copy_index(url, back)
    assert contents(back) == contents(index)
    assert verify_index(back) == verify_index(url) == []


def test_a_copy_has_the_same_files(index, tmp_path):
    assert copy_index(index, tmp_path / "copy").snapshot == 1
    assert contents(tmp_path / "copy") == contents(index)
    assert verify_index(tmp_path / "copy") == []
    # erasure overwrites files in place
    assert (index / "embeddings/c.0.0").stat().st_nlink == 1


def test_an_earlier_snapshot_can_be_copied(index, tmp_path):
    copy_index(index, tmp_path / "copy", snapshot=0)
    assert len(TokenStore.open(tmp_path / "copy").fetch([3])) == 1
    assert verify_index(tmp_path / "copy") == []


def test_a_stopped_copy_is_resumed(index, tmp_path):
    calls = iter(range(100))
    with pytest.raises(JobStopped, match=r"stopped after \d+ of \d+ files"):
        copy_index(index, tmp_path / "copy", should_stop=lambda: next(calls) > 12)
    with pytest.raises(IncompleteIndexError):
        verify_index(tmp_path / "copy")
    whole = copy_index(index, tmp_path / "whole")
    rest = copy_index(index, tmp_path / "copy")
    assert 0 < rest.copied_files < whole.copied_files
    assert contents(tmp_path / "copy") == contents(index)


def test_a_copy_during_an_append_describes_its_own_rows(index, tmp_path):
    expected = contents(index)
    # an append does so before it writes index.json
    write_array_shapes(Directory(index), replace(SMALL, rows=1000))
    copy_index(index, tmp_path / "copy")
    assert contents(tmp_path / "copy") == expected
    assert verify_index(tmp_path / "copy") == []


def test_a_killed_copy_leaves_no_stray_files(index, tmp_path):
    """The process ends between writing a file and renaming it."""
    script = (
        "import os, signal, sys; from pipelines import copy_index; from"
        " storage_formats.format.directory import Directory; Directory.contents ="
        " lambda *_: os.kill(os.getpid(), signal.SIGKILL); copy_index(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, index, tmp_path / "copy"]
    killed = subprocess.run(command, env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    copy_index(index, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(index)
    assert verify_index(tmp_path / "copy") == []


@pytest.mark.parametrize(
    "path", ["index.json", "build/copy.json", "../stolen", "tokens/bf16/zarr.json"]
)
def test_a_table_cannot_name_other_files_than_data_files(index, tmp_path, path):
    manifest = Manifest.load(index)
    [table] = manifest.shard_tables
    files = read_shard_table(Directory(index), table)
    named = write_shard_table(Directory(index), [*files, (0, FileEntry(path, 5, 0))])
    replace(manifest, shard_tables=(named,)).write(Directory(index))
    with pytest.raises(CorruptIndexError, match=re.escape(path)):
        copy_index(index, tmp_path / "copy")


def test_what_cannot_be_copied_is_refused(index, tmp_path, run):
    out = tmp_path / "copy"
    for source, target, message in (
        (tmp_path / "nothing", out, "there is no index"),
        (index, index, "exists already"),
        (index, "gcs://bucket/index", "cannot be at gcs://"),
        (index, Path("s3://bucket/index"), "cannot be at s3:/"),
    ):
        with pytest.raises(UsageError, match=message):
            copy_index(source, target)
    err = run.refused("copy", index, "https://example.com/photos.edje")
    assert "can only be read" in err
    err = run.refused("copy", index, out, "--replace")
    assert "--replace: only an index at a URL" in err
    with pytest.raises(UsageError) as refused:
        copy_index(index, out, snapshot=9)
    assert refused.value.parameter == "snapshot"
