"""What a build or an append would do, and what it needs."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace

import pytest

from pipelines.jobs.dry_run import try_append, try_build
from pipelines.jobs.resources import disk_need
from pipelines.progress.events import JobStopped
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from tests.command_line import run_here
from tests.pipelines.conftest import run_build, write_photo


def quiet(_event):
    pass


def options_of(request):
    options = dict(vars(request))
    del options["max_failed"]
    return options


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_an_estimate_agrees_with_the_build_and_writes_nothing(config, tmp_path):
    request = config(dedupe=True)
    before = tree(tmp_path)
    estimate = try_build(**options_of(request))
    assert tree(tmp_path) == before
    result = run_build(request, quiet)
    assert (estimate.inputs, estimate.duplicates, estimate.shards) == (result.inputs, result.duplicates, result.shards)
    assert estimate.rows == result.rows
    assert estimate.disk_bytes == disk_need(CommittedIndex.open(request.out).manifest.spec).parts
    used = sum(path.stat().st_size for path in (Layout(request.out).tokens).rglob("c.*"))
    assert 0.9 * used <= estimate.disk_bytes["tokens"] <= 1.2 * used
    assert estimate.workers == 1


def test_a_finished_build_and_known_images_cost_nothing(config, photos):
    request = config()
    run_build(request, quiet)
    again = try_build(**options_of(request))
    assert again.finished_shards == again.shards == 3
    with pytest.raises(UsageError, match="sources"):
        try_build(**options_of(replace(request, sources=(str(photos / "00.jpg"),))))
    before = tree(request.out)
    known = try_append(request.out, (str(photos),), engine="inline")
    assert (known.inputs, known.duplicates, known.rows, known.shards) == (10, 10, 0, 0)
    assert known.disk_bytes == {}
    assert tree(request.out) == before


def test_a_dry_run_of_a_finished_build_lists_its_sources_once(config, photos, monkeypatch):
    def give(names):
        text = "".join(f"{photos / name}\n" for name in names)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    request = replace(config(), sources=("-",))
    give(["00.jpg", "01.jpg"])
    run_build(request, quiet)
    give(["00.jpg", "01.jpg"])
    again = try_build(**options_of(request))
    assert again.inputs == 2
    give(["00.jpg"])
    with pytest.raises(UsageError, match="the sources have changed"):
        try_build(**options_of(request))


def test_an_append_counts_new_images_only(config, photos):
    request = config()
    run_build(request, quiet)
    for name in range(20, 25):
        write_photo(photos / f"{name}.jpg", name)
    result = run_here("append", request.out, photos, "--engine", "inline", "--dry-run", "--quiet")
    assert (result["inputs"], result["duplicates"], result["rows"], result["shards"]) == (15, 10, 5, 2)
    assert CommittedIndex.open(request.out).manifest.snapshot.number == 0


def test_finished_shards_of_a_stopped_build_are_subtracted(config):
    request = config()
    receipts = Layout(request.out).receipt(0).parent
    with pytest.raises(JobStopped):
        run_build(request, quiet, lambda: receipts.exists() and any(receipts.iterdir()))
    before = tree(request.out)
    estimate = try_build(**options_of(request))
    assert 0 < estimate.finished_shards < estimate.shards == 3
    assert estimate.finished_shards == len(list(receipts.iterdir()))
    assert tree(request.out) == before


def test_what_a_build_refuses_is_the_same_error(config, photos, monkeypatch, run):
    monkeypatch.setattr("pipelines.jobs.resources.free_disk", lambda path: 1000)
    with pytest.raises(UsageError, match="1\\.0 kB are free"):
        try_build(**options_of(config()))
    shutil.rmtree(photos)
    photos.mkdir()
    with pytest.raises(UsageError, match="nothing to index"):
        try_build(**options_of(config()))


def test_the_command_line_shows_the_cost(config, photos, run):
    request = config()
    arguments = [
        "build",
        photos,
        "--out",
        request.out,
        "--model",
        request.model,
        "--engine",
        "inline",
        "--device",
        "cpu",
    ]
    code, out, _ = run(*arguments, "--dry-run")
    assert code == 0
    assert "10 inputs = 10 to encode + 0 duplicates + 0 that cannot be read" in out
    assert "tokens" in out
    assert not request.out.exists()
