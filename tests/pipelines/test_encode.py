"""Shards that two threads encode at once with one encoder, as on a GPU."""

import dataclasses
import threading
from collections import Counter

import pytest

from edje_index.indexing.image_encoder import ImageEncoder
from pipelines import append_index
from pipelines.cli.info import _shown, describe_index
from storage_formats.format.manifest import CommittedIndex
from tests.pipelines.conftest import run_build, stop_after_one_shard, write_photo


def stored_files(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in ("tokens", "embeddings", "checksums")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"helpers": 2},
        pytest.param(
            {"helpers": 2, "engine": "ray", "workers": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_helpers_and_engines_do_not_change_a_byte(config, tmp_path, options):
    alone = config(out=tmp_path / "alone", helpers=0)
    run_build(alone)
    other = config(**options)
    stop_after_one_shard(run_build, other)
    run_build(other)
    assert stored_files(other.out) == stored_files(alone.out)
    assert len(stored_files(alone.out)) > 3


def test_an_index_names_the_processors_of_its_tokens(config, photos, monkeypatch):
    request = config()
    monkeypatch.setattr(ImageEncoder, "processor", lambda _, size: f"GPU {size}")
    stop_after_one_shard(run_build, request)
    run_build(request)
    assert CommittedIndex.open(request.out).manifest.settings["encoded_on"] == ["GPU 2"]
    monkeypatch.setattr(ImageEncoder, "processor", lambda *_: "another GPU")
    write_photo(photos / "more" / "50.jpg", 50)
    append_index(request.out, photos / "more" / "50.jpg", engine="inline")
    assert _shown(describe_index(request.out))["encoded on"] == ["GPU 2", "another GPU"]


def test_two_shards_are_encoded_at_once(config, tmp_path, monkeypatch):
    """As on a GPU."""
    alone = config(out=tmp_path / "alone")
    run_build(alone)
    monkeypatch.setattr(
        "pipelines.jobs.build.choose_workers",
        lambda _, __, execution: dataclasses.replace(execution, workers=2),
    )
    both = threading.Barrier(2, timeout=60)
    calls = Counter()

    def should_stop():
        thread = threading.current_thread()
        calls[thread] += 1
        # the first is before the task
        if calls[thread] == 2 and thread is not threading.main_thread():
            both.wait()
        return False

    run_build(config(), should_stop=should_stop)
    assert len(calls) == 3
    assert stored_files(config().out) == stored_files(alone.out)
