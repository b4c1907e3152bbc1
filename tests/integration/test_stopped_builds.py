"""A build that a lost process stops: what the message says, and what the resumed build keeps."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time

import psutil
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.command_line import command, environment
from tests.integration.builds import make_photos

pytestmark = pytest.mark.slow

PHOTOS = 1000
KEPT = re.compile(rf"; ([\d,]+) of {PHOTOS:,} rows are kept, (\d+) of (\d+) shards? are finished\. To resume: (.*)\n$")


def wait_for(process, pattern):
    for line in process.stderr:
        if re.search(pattern, line):
            return
    raise AssertionError("the build ended too early")


def test_a_killed_raylet_is_one_message_that_says_what_is_kept(tmp_path):
    make_photos(tmp_path / "photos", PHOTOS)
    create_untrained_bundle(tmp_path / "model", sizes=TINY)
    sizes = ["--shard-size", "25", "--batch-size", "1", "--threads", "1", "--max-failed", "1"]
    arguments = ["build", tmp_path / "photos", "--out", tmp_path / "index", "--model", tmp_path / "model", *sizes]
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for(process, r"shards [1-9]")
    next(child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "raylet").kill()
    killed = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert time.monotonic() - killed < 60
    assert (process.returncode, out) == (1, "")
    assert "error: Ray ended during the run: its raylet process is gone; " in err
    assert "(raylet)" not in err, "no messages of Ray itself"
    rows, finished, shards, resume = KEPT.search(err).groups()
    assert int(rows.replace(",", "")) == 25 * int(finished) > 0
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
