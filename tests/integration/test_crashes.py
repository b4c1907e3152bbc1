"""Real processes killed with SIGKILL at random moments; what is resumed ends in the
same bytes.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.command_line import command, environment, run_here
from tests.integration.builds import contents, make_photos

PHOTOS = 120


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Folder with photos, a tiny model, and an index that was built without any
    crash.
    """
    folder = tmp_path_factory.mktemp("crashes")
    make_photos(folder / "photos", PHOTOS)
    create_untrained_bundle(folder / "model", sizes=TINY)
    run_here(*build(folder, folder / "calm", "inline"))
    return folder


def build(folder, out, engine, workers=1):
    sizes = ["--shard-size", "8", "--batch-size", "4", "--threads", "1", "--dedupe"]
    options = ["--model", folder / "model", "--engine", engine, *sizes]
    if engine == "ray":
        options += ["--workers", str(workers)]
    return ["build", folder / "photos", "--out", out, *options]


def start(arguments):
    return subprocess.Popen(
        command(*arguments, "--json"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )


def victims(process, kind):
    """Living processes of a job: the driver itself, our workers (none of Ray's
    agents), or Ray's raylet.
    """
    driver = psutil.Process(process.pid)
    if kind == "driver":
        return [driver]
    names = {"worker": "ray::EdjeWorker", "raylet": "raylet"}
    found = []
    for child in driver.children(recursive=True):
        try:
            if names[kind] in " ".join(child.cmdline()[:1]):
                found.append(child)
        except psutil.Error:
            continue
    return found


def kill_once(process, kind, delay):
    """SIGKILL a process of `kind`, `delay` seconds after one came to life; False
    where the build ended before.
    """
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if found := victims(process, kind):
                time.sleep(delay)
                if process.poll() is None:
                    os.kill(found[0].pid, signal.SIGKILL)
                    return True
        time.sleep(0.02)
    return False


def ray_leftovers(before):
    """Ray's processes that were not there before and do not go away."""
    # a raylet whose driver died while it started gives up after a minute
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [
            (process.pid, process.info["cmdline"][:3])
            for process in psutil.process_iter(["cmdline"])
            if process.pid not in before
            and any("raylet" in part for part in process.info["cmdline"] or [])
        ]
        if not found:
            return []
        time.sleep(0.5)
    return found


# About how long a process of each kind lives in a build of this size, seconds.
LIFETIME = {"driver": 6.0, "inline": 3.0, "worker": 3.0, "raylet": 4.0}


def crash_and_resume(case, out, kind, chance, *, workers=2):
    """Kill a process of `kind` in a new build at a random moment, resume, and compare
    with the calm build.

    A build whose worker is killed ends by itself: another worker indexes the shard. A
    kill that comes too late, when the build is done, does not count: the build is begun
    anew with an earlier one.
    """
    delay = chance.uniform(0, LIFETIME[kind])
    for _ in range(5):
        process = start(
            build(case, out, "inline" if kind == "inline" else "ray", workers)
        )
        hit = kill_once(process, "driver" if kind == "inline" else kind, delay)
        code = process.wait(timeout=180)
        if hit:
            assert code == 0 or kind != "worker"
            break
        shutil.rmtree(out)
        delay /= 2
    assert hit, f"no process of kind {kind} could be killed in five builds"
    result = run_here(*build(case, out, "inline"))
    assert (
        result["inputs"]
        == result["indexed"] + result["duplicates"] + result["failed"]
        == PHOTOS
    )
    assert verify_index(out) == []
    assert contents(out) == contents(case / "calm")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("inline", 0)]
    + [
        pytest.param(kind, seed, marks=pytest.mark.slow)
        for kind in ("worker", "raylet", "driver", "inline")
        for seed in range(1, 6)
    ],
)
def test_a_killed_build_resumes_to_the_same_bytes_and_leaves_no_ray_behind(
    case, tmp_path, kind, seed
):
    before = {process.pid for process in psutil.process_iter()}
    crash_and_resume(
        case,
        tmp_path / "index",
        kind,
        random.Random(f"{kind} {seed}"),
        workers=1 + seed % 2,
    )
    assert kind != "driver" or ray_leftovers(before) == []
