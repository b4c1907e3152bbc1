"""Builds that a user or a lost process stops: what the message says, and what the resumed build keeps."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.command_line import command, environment, run_process
from tests.integration.builds import contents, make_photos

pytestmark = pytest.mark.slow

PHOTOS = 4000
KEPT = re.compile(rf"; ([\d,]+) of {PHOTOS:,} rows are kept, (\d+) of (\d+) shards? are finished\. To resume: (.*)\n$")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder with photos, a tiny model, and an index that was built without interruption."""
    folder = tmp_path_factory.mktemp("stopped")
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    run_process(*build(folder, folder / "calm", "inline", PHOTOS))
    return folder


def build(folder, out, engine, shard_size):
    sizes = ["--shard-size", str(shard_size), "--batch-size", "1", "--threads", "1", "--max-failed", "1"]
    return ["build", folder / "photos", "--out", out, "--model", folder / "model", "--engine", engine, *sizes]


def start(arguments):
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def wait_for(process, pattern):
    for line in process.stderr:
        if re.search(pattern, line):
            return
    raise AssertionError("the build ended too early")


@pytest.mark.parametrize("engine", ["inline", "ray"])
def test_ctrl_c_inside_the_only_shard_keeps_its_rows(case, tmp_path, engine):
    arguments = build(case, tmp_path / "index", engine, PHOTOS)
    process = start(arguments)
    staging = tmp_path / "index" / "build" / "staging"
    while not (staging.exists() and any(staging.iterdir())):  # lines of progress are too rare on a fast machine
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    rows, finished, shards, resume = KEPT.search(err).groups()
    assert (finished, shards) == ("0", "1")
    assert 0 < int(rows.replace(",", "")) < PHOTOS
    assert shlex.split(resume) == ["edje-index", *map(str, arguments)]
    resumed = start(arguments)
    progress = resumed.communicate(timeout=300)[1]
    first = int(re.search(r"indexing: ([\d,]+)/", progress)[1].replace(",", ""))
    assert first > int(rows.replace(",", "")), "the resumed build begins after the rows that were kept"
    assert verify_index(tmp_path / "index") == []
    assert contents(tmp_path / "index") == contents(case / "calm")


def test_a_killed_raylet_is_one_message_that_says_what_is_kept(case, tmp_path):
    arguments = build(case, tmp_path / "index", "ray", 100)
    process = start(arguments)
    wait_for(process, r"shards [1-9]")
    next(child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "raylet").kill()
    killed = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - killed < 60
    assert (process.returncode, out) == (1, "")
    assert "error: Ray ended during the run: its raylet process is gone; " in err
    assert "(raylet)" not in err, "no messages of Ray itself"
    rows, finished, shards, resume = KEPT.search(err).groups()
    assert int(rows.replace(",", "")) >= 100 * int(finished) > 0
    assert shards == "40"
    assert shlex.split(resume) == ["edje-index", *map(str, arguments)]
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *shlex.split(resume)[1:], "--json"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert verify_index(tmp_path / "index") == []
