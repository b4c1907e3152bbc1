"""build, info, verify and search from the command line, on real files and a tiny
model.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from edje_index.indexing.image_encoder import ImageEncoder
from pipelines import quantize_index
from storage_formats.format.places import Directory
from storage_formats.format.rows import read_rows
from tests.conftest import ann_path, environment, rows_path
from tests.pipelines.conftest import (
    INLINE,
    run_build,
    stop_after_one_shard,
    write_photo,
)


@pytest.fixture
def index(tmp_path):
    return tmp_path / "photos.edje"


@pytest.fixture
def build(photos, tiny_bundle, index):
    """Arguments of a build of `photos` in shards of four."""
    return ["build", photos, "--out", index, "--model", tiny_bundle, *INLINE]


def test_a_build_accounts_for_every_input(run, build, index):
    code, out, err = run(*build, "--dedupe", "--json")
    assert code == 0
    result = json.loads(out)
    counts = {"inputs": 10, "indexed": 8, "duplicates": 1, "failed": 1}
    assert result.items() >= (counts | {"rows": 10, "shards": 3}).items()
    assert result["failed_by_reason"] == {"not-an-image": 1}
    assert result["images_per_second"] > 0
    assert result["bottleneck"] in ("read", "decode", "model", "write")
    assert result["already_finished"] is False
    assert "duplicates 1, ignored (.txt 1)" in err
    assert result["ignored"] == {".txt": 1}
    assert f"1 input failed; 'edje-index failures {index}' lists" in err
    assert not Directory(index).journal.exists()
    rows = read_rows(index).to_pylist()
    assert [row["status"] for row in rows].count("indexed") == 8
    assert rows[3]["duplicate_of"] == 1


def test_an_output_in_its_source_is_no_input(run, build, photos):
    code, out, err = run(*build, "--out", photos / "own.edje", "--json")
    assert (code, json.loads(out)["inputs"]) == (0, 10), err
    assert "(index) 1" in err
    updated = run.json("update", photos / "own.edje", "--engine", "inline")
    assert (updated["unchanged"], updated["failed"]) == (9, 1)


def test_truncated_images_are_loaded_on_request_and_counted(run, build, index, photos):
    (photos / "08.jpg").write_bytes((photos / "08.jpg").read_bytes()[:-300])
    result = run.json(*build, "--truncated", "load")
    assert (result["indexed"], result["truncated"]) == (9, 1)
    row = read_rows(index, [8]).to_pylist()[0]
    assert (row["status"], row["reason"], row["width"] > 0) == ("indexed", None, True)
    assert "truncated" in row["detail"]
    run.ok("verify", index)
    assert run.json(*build, "--truncated", "load")["truncated"] is None


def test_the_same_command_again_does_nothing_and_says_so(run, build, index):
    run(*build)
    before = {path: path.stat().st_mtime_ns for path in index.rglob("*")}
    assert re.search("already finished +yes", run.ok(*build))
    assert run.json(*build)["already_finished"] is True
    assert {path: path.stat().st_mtime_ns for path in index.rglob("*")} == before


def test_a_missing_or_shortened_file_of_a_finished_index_is_reported(run, build, index):
    run(*build)
    path = rows_path(index)
    with open(path, "ab") as file:
        file.truncate(100)
    code, _, err = run(*build)
    assert (code, f"rows/{path.name} has 100 bytes" in err) == (1, True)
    for name in (
        "checksums/bf16/00000000.crc32c",
        f"ann/{ann_path(index).name}",
        "tokens/bf16/zarr.json",
    ):
        (index / name).rename(index / "kept")
        code, out, err = run(*build)
        (index / "kept").rename(index / name)
        assert (code, out) == (1, "")
        assert f"{index} is finished but damaged" in err
        assert f"{name} " in err


def test_a_finished_index_is_not_rebuilt_for_other_inputs_or_settings(
    run, build, photos
):
    run(*build)
    err = run.refused(*build, "--truncated", "load")
    assert "--truncated: " in err
    write_photo(photos / "new.jpg", 99)
    (photos / "00.jpg").unlink()
    write_photo(photos / "01.jpg", 98)
    with open(photos / "01.jpg", "ab") as file:
        file.write(b"longer")
    err = run.refused(*build)
    assert "they had 10 inputs and now have 10" in err


def test_a_build_where_everything_fails_writes_no_index(run, build, photos, index):
    for photo in photos.glob("*.jpg"):
        photo.write_bytes(b"")
    code, _, err = run(*build)
    assert code == 1
    assert "none of the 10 inputs could be indexed (empty 10)" in err
    assert f"{photos / '02.jpg'} (empty)" in err
    assert not Directory(index).manifest.exists()


def test_a_build_with_too_many_failures_stops_and_goes_on_with_a_larger_limit(
    run, build, photos, index
):
    (photos / "02.jpg").write_bytes(b"")
    # the second time, before it encodes anything
    for _ in range(2):
        code, out, err = run(*build, "--max-failed", 0.19)
        assert (code, out) == (1, "")
        assert "2 of the first 8 inputs failed, more than the 1" in err
        assert f"{photos / '02.jpg'} (empty), {photos / '07.jpg'} (not-an-image)" in err
        assert "Finished and kept: 2 of 3 shards" in err
        assert "error: --max-failed: " in err
        assert not Directory(index).manifest.exists()
    assert len(run("failures", index)[1].splitlines()) == 2
    kept = Directory(index).embedding_shard(0).stat().st_mtime_ns
    out = run.json(*build, "--max-failed", 0.2)
    assert out["failed"] == 2
    # a resumed build knows what its plan ignored
    assert out["ignored"] == {".txt": 1}
    assert run.json(*build, "--max-failed", 0.2)["ignored"] is None
    # finished shards are not encoded again
    assert Directory(index).embedding_shard(0).stat().st_mtime_ns == kept


def test_twenty_inputs_may_fail_by_default_and_no_more(run, build, photos, index):
    for number in range(20):
        # 07.jpg is bad as well
        (photos / f"bad-{number:02}.jpg").write_bytes(b"")
    code, _, err = run(*build)
    assert code == 1
    assert "21 of 30 inputs failed, more than the 20" in err
    shutil.rmtree(index)
    (photos / "bad-19.jpg").unlink()
    run.ok(*build)


def test_a_list_of_wrong_paths_is_refused_by_a_dry_run_too(run, build, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"elsewhere/{number}.jpg\n" for number in range(30)))
    command = [build[0], listed, *build[2:]]
    for arguments in (["--dry-run"], []):
        code, _, err = run(*command, *arguments)
        assert code == 1
        assert "inputs failed, more than the 20" in err
        assert "relative paths in a list begin at the directory of the list" in err


def test_info_of_a_begun_and_of_a_finished_index(run, build, index, config):
    stop_after_one_shard(run_build, config())
    begun = run.json("info", config().out)
    assert (begun["state"], begun["shards"]) == ("begun", 3)
    assert begun["unfinished"] == {"kind": "build", "finished_shards": 1}
    run(*build)
    assert run.json("info", index)["unfinished"] is None
    stop_after_one_shard(quantize_index, index, ["fp8"])
    assert "run 'quantize' again to finish it" in run("info", index)[1]
    finished = run.json("info", index)
    assert (finished["state"], finished["counts"]["indexed"]) == ("finished", 9)
    assert finished["model"]["trained"] is False
    assert "not-an-image 1" in run("info", index)[1]


def start_build(arguments, folder, log):
    """Start a build in a new process group, outside the directory of the sources;
    standard error goes to `log`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=log,
        cwd=folder,
        env=environment(),
        start_new_session=True,
    )


def test_ctrl_c_stops_a_build_and_the_same_command_resumes(
    run, build, photos, monkeypatch
):
    with monkeypatch.context() as patched:

        def interrupted(*arguments):
            patched.undo()
            os.kill(os.getpid(), signal.SIGINT)
            return ImageEncoder.encode(*arguments)

        patched.setattr(ImageEncoder, "encode", interrupted)
        monkeypatch.setattr(sys, "argv", ["edje-index", *map(str, build)])
        code, _, said = run(*build)
    assert code == 130
    last = said.splitlines()[-1]
    assert last.startswith("error: stopped; ")
    assert f"of 3 shards are finished. To resume: edje-index build {photos}" in last
    assert run.json(*build)["indexed"] == 9


# starts processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGTERM, True), (signal.SIGHUP, False)]
)
def test_a_signal_stops_a_build_on_ray_and_the_same_command_resumes(
    run, build, photos, index, tmp_path, number, to_group
):
    for name in range(100, 130):
        write_photo(photos / f"{name}.jpg", name % 3)
    build[build.index("--engine") + 1] = "ray"
    with open(tmp_path / "log", "w") as log:
        process = start_build(build, tmp_path, log)
        deadline = time.monotonic() + 120
        while not list(Directory(index).receipts.glob("*.json")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert process.wait(timeout=60) == 1
    said = (tmp_path / "log").read_text()
    assert f"{number.name}: stopping" in said
    last = said.splitlines()[-1]
    assert last.startswith("error: stopped; ")
    assert f"of 10 shards are finished. To resume: edje-index build {photos}" in last
    assert "Traceback" not in said
    assert psutil.wait_procs(family, timeout=10)[1] == []
    build[build.index("--engine") + 1] = "inline"
    result = run.json(*build)
    assert (result["inputs"], result["indexed"], result["failed"]) == (40, 39, 1)
    run.ok("verify", index)
