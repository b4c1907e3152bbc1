"""What a build would do, and what it needs."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace

import pytest

from pipelines.jobs.build import try_build
from pipelines.jobs.resources import disk_need
from storage_formats.errors import UsageError
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import CommittedIndex
from tests.pipelines.conftest import run_build, stop_after_one_shard


def estimate(request):
    options = dict(vars(request))
    del options["max_failed"]
    return try_build(**options)


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_an_estimate_agrees_with_the_build_and_writes_nothing(config, tmp_path):
    request = config(dedupe=True)
    before = tree(tmp_path)
    tried = estimate(request)
    assert tree(tmp_path) == before
    stop_after_one_shard(run_build, request)
    stopped = tree(request.out)
    assert estimate(request)["finished_shards"] == 1
    assert tree(request.out) == stopped
    result = run_build(request)
    for name in ("inputs", "duplicates", "rows", "shards"):
        assert tried[name] == getattr(result, name)
    assert tried["disk_bytes"] == disk_need(CommittedIndex.open(request.out).manifest.spec)
    used = sum(path.stat().st_size for path in (Layout(request.out).tokens).rglob("c.*"))
    assert 0.9 * used <= tried["disk_bytes"]["tokens"] <= 1.2 * used
    assert (tried["workers"], tried["finished_shards"]) == (1, 0)


def test_a_dry_run_of_a_finished_build_lists_its_sources_once(config, photos, monkeypatch):
    def give(names):
        text = "".join(f"{photos / name}\n" for name in names)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    request = replace(config(), sources=("-",))
    give(["00.jpg", "01.jpg"])
    run_build(request)
    give(["00.jpg", "01.jpg"])
    again = estimate(request)
    assert again["inputs"] == 2
    assert again["finished_shards"] == again["shards"] == 1
    give(["00.jpg"])
    with pytest.raises(UsageError, match="the sources have changed"):
        estimate(request)


def test_what_a_build_refuses_is_the_same_error(config, photos, monkeypatch):
    monkeypatch.setattr("pipelines.jobs.resources.free_disk", lambda path: 1000)
    with pytest.raises(UsageError, match="1\\.0 kB are free"):
        estimate(config())
    shutil.rmtree(photos)
    photos.mkdir()
    with pytest.raises(UsageError, match="nothing to index"):
        estimate(config())


def test_the_command_line_shows_the_cost(config, photos, run):
    out, model = config().out, config().model
    code, printed, _ = run(
        "build", photos, "--out", out, "--model", model, "--engine", "inline", "--device", "cpu", "--dry-run"
    )
    assert code == 0
    assert "10 inputs = 10 to encode + 0 duplicates + 0 that cannot be read" in printed
    assert "tokens" in printed
    assert not out.exists()
