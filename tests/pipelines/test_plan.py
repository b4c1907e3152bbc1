"""Preparing a build: the stored plan, resuming from it, and refused requests."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil

import pytest

from edje_index.bundles.info import read_bundle_info
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.images.input_lists import read_shard_inputs
from pipelines.planning import plan as planning
from pipelines.planning import resources
from pipelines.planning.output import check_output
from pipelines.planning.plan import BuildSettings, read_plan
from pipelines.planning.prepare import prepare_build
from pipelines.planning.resources import check_index_size, check_workers, choose_workers, disk_need, model_memory_need
from pipelines.progress.events import JobStopped
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import json_checksum
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest


def plan(config, **options):
    return prepare_build(config, lambda _: None, **options).plan


def test_a_plan_holds_every_input_and_is_read_back(config):
    made = plan(config())
    assert made.spec == IndexSpec(10, 4, (4, 16), 24)
    assert made.ignored == {".txt": 1}
    layout = Layout(made.root)
    names = [
        os.path.basename(ref.path).decode() for shard in range(3) for ref in read_shard_inputs(layout, made.spec, shard)
    ]
    assert names == [f"{name:02d}.jpg" for name in range(10)]
    assert read_plan(made.root) == made
    assert json.loads(layout.plan.read_text())["fingerprint"] == made.fingerprint


def test_a_begun_index_goes_on_from_its_plan_without_looking_at_the_sources(config, photos):
    begun = plan(config())
    shutil.rmtree(photos)
    photos.mkdir()
    assert plan(config()) == begun


def test_duplicates_are_decided_in_the_plan(config):
    made = plan(config(dedupe=True))
    refs = read_shard_inputs(Layout(made.root), made.spec, 0)
    assert [ref.duplicate_of for ref in refs] == [None, None, None, 1]
    assert made.duplicates == 1


def test_plans_of_earlier_versions_keep_their_fingerprints(config):
    layout, made = Layout(config().out), plan(config())
    earlier = json.loads(layout.plan.read_text())
    del earlier["crc32c"]
    for name in ("truncated", "frames"):
        del earlier["settings"][name]
    layout.plan.write_text(json.dumps({**earlier, "crc32c": json_checksum(earlier)}))
    assert read_plan(made.root) == made
    parts = {"version": 1, "encoder": made.model["fingerprint"], "settings": earlier["settings"]}
    text = json.dumps({**parts, "inputs": made.inputs_digest}, sort_keys=True)
    assert made.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    for later in ({"truncated": "load"}, {"frames": 8}):
        settings = dataclasses.replace(made.settings, **later)
        assert dataclasses.replace(made, settings=settings).fingerprint != made.fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard_size": 5}, "shard_size 4 in the index, 5 requested"),
        ({"batch_size": 3}, "batch_size 2 in the index, 3 requested"),
        ({"threads": 2}, "threads 1 in the index, 2 requested"),
        ({"dedupe": True}, "dedupe False in the index, True requested"),
        ({"max_pixels": 100}, "max_pixels .* in the index, 100 requested"),
        ({"truncated": "load"}, "truncated fail in the index, load requested"),
        ({"dtype": "bfloat16"}, "dtype float32 in the index, bfloat16 requested"),
    ],
)
def test_other_settings_over_a_begun_index_are_refused_with_both_fingerprints(config, change, words):
    begun = plan(config())
    with pytest.raises(UsageError, match=words) as caught:
        plan(config(**change))
    assert begun.fingerprint in str(caught.value)
    assert caught.value.parameter in change
    assert read_plan(begun.root) == begun


def test_another_model_over_a_begun_index_is_refused_with_both_fingerprints(config, tmp_path):
    begun = plan(config())
    other = create_untrained_bundle(tmp_path / "other", seed=1, sizes=TINY)
    with pytest.raises(UsageError, match=begun.model["fingerprint"]) as caught:
        plan(dataclasses.replace(config(), model=other.path))
    assert other.encoder_fingerprint in str(caught.value)


def test_engine_and_workers_may_change(config):
    begun = plan(config())
    assert plan(config(engine="ray", workers=2)) == begun


def test_what_the_machine_chose_is_taken_from_the_begun_index(config):
    begun = plan(config(threads=3))
    assert plan(config(threads=None, device="auto", dtype="auto")).settings == begun.settings


@pytest.mark.parametrize(
    ("dtype", "device", "has_bfloat16", "chosen"),
    [
        (None, "cpu", True, "float32"),
        (None, "cuda", False, "bfloat16"),
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("auto", "cuda", False, "bfloat16"),
        ("bfloat16", "cpu", False, "bfloat16"),
        ("float32", "cuda", True, "float32"),
    ],
)
def test_only_auto_depends_on_the_model_of_the_cpu(config, monkeypatch, dtype, device, has_bfloat16, chosen):
    monkeypatch.setattr(planning, "has_bfloat16", lambda: has_bfloat16)
    assert BuildSettings.choose(config(dtype=dtype, device=device)).dtype == chosen


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_another_machine_goes_on_with_the_data_type_of_the_first(config, monkeypatch, dtype):
    monkeypatch.setattr(planning, "has_bfloat16", lambda: True)
    begun = plan(config(dtype="auto"))
    assert begun.settings.dtype == "bfloat16"
    monkeypatch.setattr(planning, "has_bfloat16", lambda: False)
    assert plan(config(dtype=dtype)) == begun


def test_a_model_bundle_may_move(config, tmp_path, tiny_bundle):
    plan(config())
    shutil.copytree(tiny_bundle, tmp_path / "moved")
    moved = plan(dataclasses.replace(config(), model=tmp_path / "moved"))
    assert moved.model["bundle"] == str(tmp_path / "moved")


def test_nothing_to_index_is_refused_and_leaves_nothing(config, tmp_path, photos):
    for photo in photos.glob("*.jpg"):
        photo.unlink()
    with pytest.raises(UsageError, match=r"nothing to index .*\.txt 1"):
        plan(config())
    assert not Layout(tmp_path / "index").input_lists.exists()


def test_a_full_disk_is_refused_with_numbers(config, monkeypatch):
    monkeypatch.setattr(resources, "free_disk", lambda _: 12_345)
    with pytest.raises(UsageError, match=r"10 inputs needs .* \(tokens .*embeddings .* but only 12\.3 kB are free"):
        plan(config())


def test_too_little_memory_is_refused_with_numbers(config, monkeypatch):
    monkeypatch.setattr(resources, "available_memory", lambda: 10**8)
    with pytest.raises(UsageError, match=r"at least .* of memory, but only 100\.0 MB are free; use fewer workers"):
        plan(config())


def test_the_memory_limit_reduces_the_workers_but_not_a_given_number(config, tiny_bundle, monkeypatch):
    monkeypatch.setattr(resources, "usable_cpus", lambda: 8)
    info = read_bundle_info(tiny_bundle)
    settings = dataclasses.replace(plan(config()).settings, threads=1)
    need = model_memory_need(1, settings, info).total
    monkeypatch.setattr(resources, "available_memory", lambda: 4 * need)
    ray = config(engine="ray")
    assert check_workers(ray, settings, info) == 4
    assert check_workers(dataclasses.replace(ray, memory=100 * need), settings, info) == 4, "more than is free"
    assert check_workers(dataclasses.replace(ray, memory=3 * need - 1), settings, info) == 2
    for refused in ({"memory": need - 1}, {"memory": 3 * need - 1, "workers": 3}):
        with pytest.raises(UsageError, match=r"of memory, but only .* are allowed; allow more, or use fewer"):
            check_workers(dataclasses.replace(ray, **refused), settings, info)


def test_the_memory_limit_is_not_part_of_the_plan(config):
    begun = plan(config())
    resumed = plan(config(memory=10**10))
    assert resumed == begun
    assert resumed.fingerprint == begun.fingerprint


def test_the_memory_limit_chooses_the_nearest_neighbour_index(config, monkeypatch):
    monkeypatch.setattr(resources, "free_disk", lambda _: 10**15)
    monkeypatch.setattr(resources, "available_memory", lambda: 10**12)
    spec = IndexSpec(10_000_000, 1024, (4, 16), 384)
    assert disk_need(spec).parts["ann"] == int(10_000_000 * 104 * 1.02)
    assert disk_need(spec, memory=10**9).parts["ann"] == int(10_000_000 * 56 * 1.02)
    check_index_size(config().out, spec, memory=10**9)
    for parameter, change in (("memory", {"memory": 10**8}), ("sources", {})):
        monkeypatch.setattr(resources, "available_memory", lambda: 10**8 + 1)
        with pytest.raises(UsageError, match=r"neighbour index [\d.]+ [MG]B\) of memory, but only 100\.0 MB") as error:
            check_index_size(config().out, spec, **change)
        assert error.value.parameter == parameter


def test_cuda_without_a_device_is_refused(config, monkeypatch):
    monkeypatch.setattr(resources, "cuda_devices", lambda: 0)
    with pytest.raises(UsageError, match="no CUDA device on this machine; use the device cpu"):
        plan(config(device="cuda"))


def test_an_unknown_precision_is_refused_with_the_request(config):
    with pytest.raises(UsageError, match="unknown precision 'fp3'"):
        config(precisions=("bf16", "fp3"))


def test_a_precision_that_does_not_fit_the_tokens_is_refused_and_leaves_nothing(config):
    with pytest.raises(UsageError, match="mxfp8"):
        plan(config(precisions=("mxfp8",)))
    layout = Layout(config().out)
    assert not layout.plan.exists()
    assert not layout.input_lists.exists()


@pytest.mark.parametrize("name", ["photo.jpg", "build/other"])
def test_a_folder_with_other_things_in_it_is_refused(config, name):
    stranger = config().out / name
    stranger.parent.mkdir(parents=True)
    stranger.touch()
    with pytest.raises(UsageError, match="not empty and not an index"):
        check_output(config())
    assert stranger.exists()


def test_a_source_as_output_is_refused(config, photos):
    with pytest.raises(UsageError, match="also one of the sources"):
        check_output(dataclasses.replace(config(), out=photos / "." / ".." / "photos"))


def test_a_file_as_output_is_refused(config):
    config().out.touch()
    with pytest.raises(UsageError, match="not a directory"):
        check_output(config())


def test_what_an_interrupted_listing_left_is_no_obstacle(config):
    inputs = Layout(config().out).input_list(77)
    inputs.parent.mkdir(parents=True)
    inputs.write_bytes(b"half a file")
    (Layout(config().out).build / ".plan.json.0123").write_bytes(b"half a plan")
    check_output(config())
    plan(config())
    assert not inputs.exists()


def test_a_stop_while_listing_leaves_no_plan(config):
    with pytest.raises(JobStopped, match="stopped while listing the sources"):
        plan(config(), should_stop=lambda: True)
    assert read_plan(config().out) is None


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"version": 1}'])
def test_a_damaged_plan_is_one_clear_error(config, damage):
    made = plan(config())
    Layout(made.root).plan.write_bytes(damage)
    with pytest.raises(CorruptIndexError, match="build again"):
        plan(config())


def test_a_plan_changed_by_hand_is_refused(config):
    path = Layout(plan(config()).root).plan
    path.write_text(path.read_text().replace('"batch_size": 2', '"batch_size": 3'))
    with pytest.raises(CorruptIndexError, match="was changed"):
        plan(config())


@pytest.mark.parametrize("change", ['"rows": 10', '"duplicates": 0', '"offset": 1'])
def test_every_member_of_a_plan_is_covered_by_its_checksum(config, change):
    path = Layout(plan(config()).root).plan
    name = change.partition(":")[0]
    text = path.read_text()
    path.write_text(text.replace(change, f"{name}: 9") if change in text else text.replace("{", "{" + change + ",", 1))
    with pytest.raises(CorruptIndexError, match="was changed"):
        read_plan(config().out)


@pytest.mark.parametrize("path", ["build/plan.json", "index.json"])
def test_deeply_nested_json_is_damage(config, path):
    root = plan(config()).root
    (root / path).write_text("[" * 100_000)
    with pytest.raises(CorruptIndexError, match="cannot read"):
        Manifest.load(root) if path == "index.json" else read_plan(root)


def test_a_plan_that_cannot_be_flushed_leaves_nothing_that_stops_the_next_build(config, monkeypatch):
    def fail_for_build(path):
        if path == Layout(config().out).build:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("storage_formats.atomic.fsync_path", fail_for_build)
    with pytest.raises(OSError, match="Input/output error"):
        plan(config())
    monkeypatch.undo()
    assert read_plan(config().out) is None
    plan(config())
    assert Layout(config().out).input_list(0).exists()


def test_disk_need_is_what_the_files_take():
    need = disk_need(IndexSpec(2500, 1024, (64, 384), 512))
    assert need.parts["tokens"] == pytest.approx(2500 * 64 * 384 * 2 * 1.02, rel=0.002)
    assert need.parts["embeddings"] == int(3 * 1024 * 512 * 4 * 1.02)
    assert need.total == sum(need.parts.values())


def test_workers_fill_the_machine_unless_told(config, monkeypatch):
    monkeypatch.setattr(resources, "usable_cpus", lambda: 9)
    monkeypatch.setattr(resources, "cuda_devices", lambda: 3)
    settings = plan(config()).settings
    assert choose_workers(config(engine="inline", workers=5), settings) == 1
    assert choose_workers(config(engine="ray"), dataclasses.replace(settings, threads=4)) == 2
    assert choose_workers(config(engine="ray", workers=5), settings) == 5
    assert choose_workers(config(engine="ray"), dataclasses.replace(settings, device="cuda")) == 3
    assert choose_workers(config(engine="ray", address="head:6379"), settings) is None
