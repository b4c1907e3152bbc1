"""Shards that two threads encode at once with one encoder, as on a GPU."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from pathlib import Path

import pytest

from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.indexing.shard_encoding import ShardTask
from edje_index.inputs.input_lists import write_input_lists
from edje_index.inputs.preparation import DecodeSettings
from edje_index.inputs.refs import InputRef
from pipelines import append_index
from pipelines.cli.info import _shown, describe_index
from pipelines.engines.base import run_inline
from pipelines.jobs.build import ShardWorker
from pipelines.jobs.plan import BuildSettings
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from tests.pipelines.conftest import run_build, stop_after_one_shard, write_photo

SETTINGS = BuildSettings.choose(
    None,
    sources=(),
    column=None,
    dedupe=False,
    precisions=("bf16",),
    max_pixels=None,
    batch_size=1,
    threads=1,
    device="cpu",
    dtype=None,
    frames=None,
    shard_size=None,
)


def stored_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for folder in ("tokens", "embeddings", "checksums")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"helpers": 5},
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


@pytest.fixture
def tasks(tmp_path):
    """Four shards of six photos, which are encoded one by one."""
    spec = IndexSpec(24, 6, (4, 16), 24)
    root = tmp_path / "index"
    refs = []
    for name in range(24):
        path = tmp_path / f"{name}.jpg"
        write_photo(path, name)
        refs.append(InputRef(str(path), bytes(path)))
    Directory(root).input_lists.mkdir(parents=True)
    write_input_lists(Directory(root), refs, spec.shard_size)
    return [
        ShardTask(str(root), shard, spec, "plan", 1, DecodeSettings())
        for shard in range(4)
    ]


def run_on_two_threads(tasks, bundle, on_progress, should_stop=lambda: False):
    receipts = run_inline(
        functools.partial(ShardWorker, str(bundle), SETTINGS, "cpu", 0, at_once=2),
        tasks,
        on_progress=on_progress,
        on_event=print,
        should_stop=should_stop,
        threads=2,
    )
    assert sorted(receipt.shard for receipt in receipts) == [0, 1, 2, 3]


def test_two_shards_are_encoded_at_once(tasks, tiny_bundle):
    both = threading.Barrier(2, timeout=60)
    calls = Counter()

    def should_stop():
        thread = threading.get_ident()
        calls[thread] += 1
        # the first is before the task
        if calls[thread] == 2:
            both.wait()
        return False

    run_on_two_threads(tasks, tiny_bundle, print, should_stop)
    assert len(calls) == 2
