"""The plan of a build: what it holds and needs, resuming from it, and refused
requests.
"""

import dataclasses
import os
import shutil
from types import SimpleNamespace

import psutil
import pytest

from edje_index.bundles.info import read_bundle_info
from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.inputs.input_lists import read_shard_inputs
from pipelines.engines import ray_engine
from pipelines.jobs import build as building
from pipelines.jobs import plan as planning
from pipelines.jobs.plan import (
    BuildSettings,
    Execution,
    Plan,
    check_ann_memory,
    choose_workers,
    default_shard_size,
    disk_need,
    workers_memory,
)
from pipelines.progress.events import JobStopped
from storage_formats.cgroups import available_memory
from storage_formats.errors import UsageError
from storage_formats.format.journal import read_journal
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from tests.conftest import write_files
from tests.pipelines.conftest import run_build, stop_after_one_shard


def plan(request):
    """Plan a build, stop it before its first shard, and return the stored plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.jobs.build.apply", stop)
        with pytest.raises(JobStopped, match="planned"):
            run_build(request)
    return stored_plan(request)


def stop(*_, **__):
    raise JobStopped("planned")


def stored_plan(request):
    return Plan.parse(read_journal(Directory(request.out)).plan)


def test_a_plan_holds_every_input_and_is_resumed_without_looking_at_the_sources(
    config, photos
):
    made = plan(config())
    assert made.spec == IndexSpec(10, 4, (4, 16), 24)
    assert made.ignored == {".txt": 1}
    inputs = Directory(config().out)
    refs = [read_shard_inputs(inputs, made.spec, shard) for shard in range(3)]
    names = [os.path.basename(ref.path).decode() for part in refs for ref in part]
    assert names == [f"{name:02d}.jpg" for name in range(10)]
    shutil.rmtree(photos)
    photos.mkdir()
    assert plan(config()) == made
    # they do not determine the bytes
    assert plan(config(engine="ray", workers=2)) == made


@pytest.mark.parametrize(
    ("rows", "row_bytes", "size"),
    [
        (2_047_999, 0, 1024),
        (2_048_000, 0, 2048),
        (10**8, 0, 16384),
        # the metadata of a shard is limited
        (10**8, 16 << 10, 2048),
    ],
)
def test_larger_collections_have_more_rows_per_shard(rows, row_bytes, size):
    assert default_shard_size(rows, row_bytes) == size


def test_the_default_shard_size_is_chosen_after_the_listing(config, monkeypatch):
    monkeypatch.setattr(planning, "SHARD_SIZE", 2)
    monkeypatch.setattr(planning, "_LEAST_SHARDS", 2)
    made = plan(config(shard_size=None))
    assert (made.spec.shard_size, made.settings.shard_size) == (4, 4)
    # a run that resumes the build, or finds it finished, asks for this size
    monkeypatch.undo()
    assert plan(config(shard_size=None)) == made
    assert run_build(config(shard_size=None)).shards == 3
    assert run_build(config(shard_size=None)).already_finished
    with pytest.raises(UsageError, match="shard_size 4 in the index, 8 requested"):
        run_build(config(shard_size=8))


OTHER_SETTINGS = {
    "shard_size": 5,
    "batch_size": 3,
    "threads": 2,
    "dedupe": True,
    "max_pixels": 100,
    "truncated": "load",
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused(config, finished):
    # a build that has encoded nothing is planned anew
    run_build(config()) if finished else stop_after_one_shard(run_build, config())
    for name, value in OTHER_SETTINGS.items():
        words = f"{name} .* in the index, {value} requested"
        with pytest.raises(UsageError, match=words) as caught:
            run_build(config(**{name: value}))
        assert caught.value.parameter == name


def test_another_model_is_refused_with_both_fingerprints(config, tmp_path):
    stop_after_one_shard(run_build, config())
    begun = stored_plan(config())
    other = create_untrained_bundle(tmp_path / "other", seed=1, sizes=TINY)
    with pytest.raises(UsageError, match=begun.model["fingerprint"]) as caught:
        run_build(config(model=other.path))
    assert other.encoder_fingerprint in str(caught.value)


def test_what_the_machine_chose_is_taken_from_the_begun_index(config):
    begun = plan(config(threads=3))
    assert (
        plan(config(threads=None, device="auto", dtype="auto")).settings
        == begun.settings
    )


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_another_machine_goes_on_with_the_data_type_of_the_first(
    config, monkeypatch, dtype
):
    monkeypatch.setattr(planning, "has_bfloat16", lambda: True)
    begun = plan(config(dtype="auto"))
    assert begun.settings.dtype == "bfloat16"
    monkeypatch.setattr(planning, "has_bfloat16", lambda: False)
    assert plan(config(dtype=dtype)) == begun


def test_a_model_bundle_may_move(config, tmp_path, tiny_bundle):
    plan(config())
    shutil.copytree(tiny_bundle, tmp_path / "moved")
    assert run_build(config(model=tmp_path / "moved")).indexed == 9


def test_nothing_to_index_is_refused_and_leaves_nothing(config, photos):
    for photo in photos.glob("*.jpg"):
        photo.unlink()
    with pytest.raises(UsageError, match=r"nothing to index .*\.txt 1"):
        run_build(config())
    assert not config().out.exists()


def test_too_little_space_or_memory_is_refused_with_numbers(config, monkeypatch):
    for resource, free, message in (
        ("free_disk", 12_345, r"10 inputs .*tokens .* 12\.3 kB are free"),
        ("available_memory", 10**8, r"100\.0 MB are free; use fewer workers"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(planning, resource, lambda *_, free=free: free)
            with pytest.raises(UsageError, match=message):
                run_build(config())
        assert not config().out.exists()


def test_workers_fill_the_machine_and_its_memory_unless_told(
    config, tiny_bundle, monkeypatch
):
    monkeypatch.setattr(planning, "usable_cpus", lambda: 9)
    monkeypatch.setattr(planning, "cuda_devices", lambda: 3)
    monkeypatch.setattr(ray_engine, "check_ray", lambda _: None)
    info = read_bundle_info(tiny_bundle)
    # what a build records in any case
    chosen = dict.fromkeys(["column", "max_pixels", "dtype", "frames", "shard_size"])
    chosen |= {"sources": (), "dedupe": False, "precisions": ("bf16",)}
    settings = BuildSettings.choose(
        None, **chosen, batch_size=2, threads=1, device="cpu"
    )
    need = sum(workers_memory(1, settings, info).values())
    monkeypatch.setattr(planning, "available_memory", lambda: 8 * need)

    def workers(settings=settings, **changes):
        execution = Execution(**{"engine": "ray", **changes})
        return choose_workers(settings, info, execution).workers

    # the memory has room for eight
    assert workers() == 8
    assert workers(dataclasses.replace(settings, threads=4)) == 2
    on_gpus = dataclasses.replace(settings, device="cuda")
    # two per GPU
    assert workers(on_gpus) == 6
    assert workers(on_gpus, workers=7) == 7
    monkeypatch.setattr(planning, "cuda_devices", lambda: 1)
    assert workers(on_gpus) == 2
    named = BuildSettings.choose(
        None, **chosen, batch_size=None, threads=1, device="cuda:1"
    )
    assert (named.dtype, named.batch_size, workers(named)) == ("bfloat16", 128, 2)
    assert workers(workers=3) == 3
    assert workers(engine="inline", workers=3) == 1
    assert workers(address="head:6379") is None
    monkeypatch.setattr(planning, "available_memory", lambda: 3 * need - 1)
    assert workers() == 2
    with pytest.raises(UsageError, match="use fewer"):
        workers(workers=3)


@pytest.mark.parametrize(("workers", "share"), [(None, 1 / 2), (6, 1 / 2), (7, 1 / 3)])
def test_workers_share_the_gpus_evenly(config, monkeypatch, workers, share):
    stored = plan(config())
    on_gpus = dataclasses.replace(stored.settings, device="cuda")
    shares = []
    monkeypatch.setattr(building, "cuda_devices", lambda: 3)
    monkeypatch.setattr(
        building, "open_engine", lambda *_, gpus, **__: shares.append(gpus)
    )
    change = SimpleNamespace(layout=Directory(config().out))
    stored = dataclasses.replace(stored, settings=on_gpus)
    building.encoding(change, stored, Execution("ray", workers), print)
    assert shares == [share]


def test_a_nearest_neighbour_index_without_room_in_memory_is_refused(monkeypatch):
    spec = IndexSpec(10_000_000, 1024, (4, 16), 384)
    assert disk_need(spec)["ann"] == int(10_000_000 * 104 * 1.02)
    monkeypatch.setattr(planning, "available_memory", lambda: 10**8)
    with pytest.raises(UsageError, match=r"neighbour .*100\.0 MB"):
        check_ann_memory(spec)


def test_cuda_without_a_device_is_refused(config, monkeypatch):
    monkeypatch.setattr(planning, "cuda_devices", lambda: 0)
    with pytest.raises(UsageError, match="no CUDA device"):
        run_build(config(device="cuda"))


@pytest.mark.parametrize("precision", ["fp3", "mxfp4"])
def test_a_precision_that_is_unknown_or_does_not_fit_is_refused_and_leaves_nothing(
    config, precision
):
    with pytest.raises(UsageError, match=precision):
        run_build(config(precisions=(precision,)))
    assert not config().out.exists()


@pytest.mark.parametrize("name", ["photo.jpg", "build/other"])
def test_a_folder_with_other_things_in_it_is_refused(config, name):
    write_files(config().out, {name: ""})
    with pytest.raises(UsageError, match="not empty and not an index"):
        run_build(config())
    assert (config().out / name).exists()


def test_a_source_or_a_file_as_output_is_refused(config, photos):
    with pytest.raises(UsageError, match="also one of the sources"):
        run_build(config(out=photos / "." / ".." / "photos"))
    config().out.touch()
    with pytest.raises(UsageError, match="not a directory"):
        run_build(config())


def test_a_stop_while_listing_leaves_nothing(config):
    with pytest.raises(JobStopped, match="stopped while listing the sources"):
        run_build(config(), should_stop=lambda: True)
    assert not config().out.exists()


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_an_estimate_agrees_with_the_build_and_writes_nothing(config, tmp_path):
    request = config(dedupe=True)
    dry = config(dedupe=True, dry_run=True)
    before = tree(tmp_path)
    tried = run_build(dry)
    estimate = tried.estimate
    assert tree(tmp_path) == before
    stop_after_one_shard(run_build, request)
    stopped = tree(request.out)
    assert run_build(dry).estimate["finished_shards"] == 1
    assert tree(request.out) == stopped
    result = run_build(request)
    for name in ("inputs", "duplicates", "rows", "shards"):
        assert getattr(tried, name) == getattr(result, name)
    spec = CommittedIndex.open(request.out).manifest.spec
    assert estimate["disk_bytes"] == disk_need(spec)
    tokens = Directory(request.out).tokens.rglob("c.*")
    used = sum(path.stat().st_size for path in tokens)
    assert 0.9 * used <= estimate["disk_bytes"]["tokens"] <= 1.2 * used
    assert (estimate["workers"], estimate["finished_shards"]) == (1, 0)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")
V1_STAT = ((*V1, "memory.stat"), 5_000, 2_000)
V2_STAT = ((*V2, "memory.stat"), 5_000, 2_000)
STAT = """inactive_file 20
active_file 5
shmem 50
{0}inactive_file 200
{0}active_file 50"""


@pytest.mark.parametrize(
    ("membership", "cgroups", "expected"),
    [
        ("0::/a/b", {"": (V2, "max", 9_000), "a/b": (V2, 5_000, 6_000)}, 0),
        ("0::/a/b", {"a": (V2, 5_000, 2_000), "a/b": (V2, 4_000, 0)}, 3_000),
        # not mounted, as in a container
        ("4:memory:/a/b", {"memory": (V1, 5_000, 2_000)}, 3_000),
        # the cache of files is given up when memory is short
        ("0::/", {"": (*V2_STAT, STAT.format(""))}, 3_250),
        (
            "4:memory:/",
            {"memory": (*V1_STAT, STAT.format("total_"))},
            3_250,
        ),
        (
            "1:cpu:/\n4:memory:/a/b\n0::/",
            {"memory": (V1, 2**63 - 4096, 0), "memory/a": (V1, 5_000, 1_000)},
            4_000,
        ),
        ("4:memory:/", {"": (V2, 1, 0)}, None),
    ],
)
def test_the_limits_of_all_cgroups_bound_the_memory(
    tmp_path, membership, cgroups, expected
):
    write_files(tmp_path, {"proc/self/cgroup": membership})
    for cgroup, (names, *values) in cgroups.items():
        folder = tmp_path / "sys/fs/cgroup" / cgroup
        write_files(folder, dict(zip(names, values, strict=True)))
    available = available_memory(tmp_path)
    if expected is None:
        assert 10**6 < available <= psutil.virtual_memory().total
    else:
        assert available == expected
