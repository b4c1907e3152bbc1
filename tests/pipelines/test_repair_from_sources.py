"""Repairs of tokens from the photos: the result has the committed bytes, or the
rows that prevent it are named.
"""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import append_index, delete_rows, quantize_index, repair_index
from pipelines.progress.events import JobStopped
from storage_formats import verify_index
from tests.conftest import REPO, all_files
from tests.pipelines.conftest import run_build, write_photo
from tests.pipelines.test_build_transient import break_reads
from tests.pipelines.test_repair import harm

FIRST = "tokens/bf16/c.0.0.0"
SECOND = "tokens/bf16/c.1.0.0"


@pytest.fixture
def index(config):
    """An index of ten photos in shards of four rows: 03 is a duplicate, 07 failed."""
    run_build(config())
    return Path(config().out)


@pytest.mark.parametrize("how", ["missing", "short", "noise", "flipped"])
def test_damaged_tokens_are_encoded_again(index, how):
    before = all_files(index)
    harm(index / FIRST, how)
    result = repair_index(index)
    assert [(file.path, file.source) for file in result.repaired] == [
        (FIRST, "the sources")
    ]
    assert result.left == ()
    assert all_files(index) == before


def test_tokens_and_checksums_in_every_precision(index):
    quantize_index(index, ["fp8", "int8"])
    before = all_files(index)
    for path in [
        *(index / "tokens").rglob("c.*"),
        *(index / "checksums").rglob("*.crc32c"),
    ]:
        path.unlink()
    assert repair_index(index).left == ()
    assert all_files(index) == before


def test_appended_and_deleted_rows(index, photos):
    write_photo(photos / "new/20.jpg", 20)
    append_index(index, photos / "new", engine="inline")
    delete_rows(index, rows=[0, 12])
    before = all_files(index)
    harm(index / FIRST, "missing")
    harm(index / "tokens/bf16/c.3.0.0", "missing")
    assert {file.source for file in repair_index(index).repaired} == {"the sources"}
    assert all_files(index) == before


def test_changed_and_missing_photos_are_refused_and_named(index, photos, run):
    for path in (FIRST, SECOND):
        harm(index / path, "missing")
    write_photo(photos / "01.jpg", 99)
    (photos / "02.jpg").unlink()
    code, out, _ = run("repair", index)
    assert code == 1
    assert (
        f"row 1 cannot be encoded again from {photos / '01.jpg'}: its content has"
        " changed" in out
    )
    assert f"row 2 cannot be encoded again from {photos / '02.jpg'}: missing" in out
    assert "row 0 " not in out
    assert f"path {SECOND}, source the sources" in out
    assert {problem.path for problem in verify_index(index)} == {FIRST}


def test_only_needed_rows_are_named(index, photos):
    path = index / FIRST
    # row 0
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    write_photo(photos / "00.jpg", 98)
    # the same batch
    write_photo(photos / "01.jpg", 99)
    refused = [
        problem.message
        for problem in repair_index(index).left
        if problem.code == "source-refused"
    ]
    assert [message.split(" cannot")[0] for message in refused] == ["row 0"]


def test_without_the_model_the_damage_stays_and_the_model_is_named(
    index, tiny_bundle, tmp_path
):
    before = all_files(index)
    harm(index / FIRST, "missing")
    damaged = all_files(index)
    wrong = Path(shutil.copytree(tiny_bundle, tmp_path / "wrong"))
    (wrong / "bundle.json").unlink()
    messages = [problem.message for problem in repair_index(index, model=wrong).left]
    assert any(
        message.startswith("its rows cannot be encoded again: ") and "wrong" in message
        for message in messages
    )
    assert all_files(index) == damaged
    assert repair_index(index, model=tiny_bundle).left == ()
    assert all_files(index) == before


def test_a_source_that_cannot_be_read_now_does_not_end_the_repair(
    index, photos, run, monkeypatch
):
    before = all_files(index)
    for path in (FIRST, SECOND):
        harm(index / path, "missing")
    with monkeypatch.context() as patched:
        break_reads(patched, photos / "01.jpg", errno.EIO)
        code, out, _ = run("repair", index)
    assert code == 1
    assert (
        f"its rows cannot be encoded again: cannot read {photos / '01.jpg'}:"
        " Input/output error; " in out
    )
    assert ". Then run the repair again" in out
    assert f"path {SECOND}, source the sources" in out
    assert repair_index(index).left == ()
    assert all_files(index) == before


@pytest.mark.parametrize("text", ["verifying", "repairing", "encoding rows of shard"])
def test_a_stopped_repair_changes_nothing(index, text):
    harm(index / FIRST, "missing")
    damaged = all_files(index)
    events = []
    with pytest.raises(JobStopped, match="files that were repaired stay repaired"):
        repair_index(
            index, on_event=events.append, should_stop=lambda: text in str(events)
        )
    assert text in str(events[-1])
    assert all_files(index) == damaged


# starts processes
@pytest.mark.slow
def test_a_killed_repair_can_be_repeated(index):
    before = all_files(index)
    command = [sys.executable, "-m", "pipelines.cli", "repair", str(index)]
    for delay in (0.5, 1.0, 2.0, 3.0):
        for path in (FIRST, SECOND):
            (index / path).unlink(missing_ok=True)
        process = subprocess.Popen(command, cwd=REPO)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, cwd=REPO, check=False).returncode == 0
    assert verify_index(index) == []
    after = all_files(index)
    assert {path: after[path] for path in before} == before
