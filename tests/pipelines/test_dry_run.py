"""What a build would do, and what it needs."""

from __future__ import annotations

from pipelines.jobs.build import try_build
from pipelines.jobs.resources import disk_need
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


def test_the_command_line_shows_the_cost(config, photos, run):
    out, model = config().out, config().model
    code, printed, _ = run(
        "build", photos, "--out", out, "--model", model, "--engine", "inline", "--device", "cpu", "--dry-run"
    )
    assert code == 0
    assert "10 inputs = 10 to encode + 0 duplicates + 0 that cannot be read" in printed
    assert "tokens" in printed
    assert not out.exists()
