"""`edje-index quantize` as a user runs it."""

from __future__ import annotations

import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines import quantize_index
from pipelines.jobs.quantize import precision_to_read
from pipelines.progress.wording import human_bytes
from storage_formats import UsageError, codec, verify_index
from storage_formats.format.layout import IndexSpec, Layout, padded_shard_bytes
from storage_formats.format.manifest import Manifest
from tests.command_line import run_here, run_process
from tests.conftest import write_random_index
from tests.integration.builds import contents, make_photos
from tests.pipelines.conftest import stop_after_one_shard

SPEC = IndexSpec(9, 4, (4, 32), 4)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    make_photos(folder / "photos", 30)
    create_untrained_bundle(folder / "model", sizes=TINY)
    return folder


def build(case, out, *options):
    common = ("--model", case / "model", "--engine", "inline", "--shard-size", 8)
    return run_here("build", case / "photos", "--out", out, *common, *options)


def test_quantize_repeats_and_drops(tmp_path):
    root = tmp_path / "a"
    write_random_index(root, SPEC)

    def error(*options):
        return run_here("quantize", root, *options, expect=2)["error"]

    first = run_here("quantize", root, "--to", "fp8", "--to", "sign1")
    assert (first["source"], first["added"]) == ("bf16", ["fp8", "sign1"])
    assert first["precisions"] == ["bf16", "fp8", "sign1"]
    assert first["bytes_per_image"]["bf16"] == 256
    again = run_here("quantize", root, "--to", "fp8")
    assert (again["source"], again["added"]) == (None, [])
    dropped = run_here("quantize", root, "--to", "fp8", "--drop", "bf16")
    assert (dropped["dropped"], dropped["precisions"]) == (["bf16"], ["fp8", "sign1"])
    assert verify_index(root) == []
    assert "without tokens" in error("--drop", "fp8", "--drop", "sign1")
    assert "both added and dropped" in error("--to", "fp8", "--drop", "fp8")
    for option in ("--to", "--drop", "--from"):
        assert "unknown precision 'fp3'" in error(option, "fp3", "--to", "fp8")
    assert "'bf16'" in error("--to", "int8", "--from", "bf16")
    assert "number of workers" in error("--to", "int8", "--address", "head:1")


def test_the_order_of_precisions_does_not_matter_to_a_resumed_conversion(tmp_path):
    write_random_index(tmp_path, SPEC)
    stop_after_one_shard(quantize_index, tmp_path, ["fp8", "int8"])
    plans = []
    quantize_index(tmp_path, ["int8", "fp8"], on_event=plans.append)
    # each thread finishes its shard
    assert plans[0].finished_shards >= 1
    assert verify_index(tmp_path) == []


def test_resuming_needs_disk_for_what_is_left_alone(tmp_path, monkeypatch):
    write_random_index(tmp_path, SPEC)
    stop_after_one_shard(quantize_index, tmp_path, ["fp8"])
    left = 3 - len(list(Layout(tmp_path).receipts.iterdir()))
    assert 0 < left < 3
    size = padded_shard_bytes(4, 4, codec("fp8", SPEC.block_shape).record_bytes)[1]
    monkeypatch.setattr("pipelines.jobs.plan.free_disk", lambda _: left * size - 1)
    with pytest.raises(UsageError, match=f"to fp8 needs {human_bytes(left * size)} "):
        quantize_index(tmp_path, ["fp8"])
    monkeypatch.setattr("pipelines.jobs.plan.free_disk", lambda _: left * size)
    assert quantize_index(tmp_path, ["fp8"]).added == ("fp8",)


def test_a_lossy_precision_does_not_pass_for_the_original(tmp_path):
    write_random_index(tmp_path, SPEC)
    quantize_index(tmp_path, ["int8"], drop=("bf16",))
    assert Manifest.load(tmp_path).encoded_from == {"int8": ("bf16",)}
    with pytest.raises(
        UsageError, match="'bf16' would be larger but not more accurate"
    ) as caught:
        quantize_index(tmp_path, ["bf16"])
    assert caught.value.parameter == "source"
    quantize_index(tmp_path, ["bf16"], source="int8")
    manifest = Manifest.load(tmp_path)
    assert manifest.encoded_from == {"int8": ("bf16",), "bf16": ("bf16", "int8")}
    assert precision_to_read(tmp_path, manifest, None) == "int8"
    assert verify_index(tmp_path) == []
    quantize_index(tmp_path, ["fp8"], source="bf16", drop=("int8",))
    assert Manifest.load(tmp_path).encoded_from == {
        "bf16": ("bf16", "int8"),
        "fp8": ("bf16", "int8", "bf16"),
    }


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (run_here, ()),
        pytest.param(run_process, ("--workers", 2), marks=pytest.mark.slow),
    ],
    ids=["inline", "ray"],
)
def test_engines_and_build_give_the_same_bytes(case, tmp_path, run, options):
    build(case, tmp_path / "a", "--precision", "bf16", "--precision", "fp8")
    build(case, tmp_path / "b")
    run("quantize", tmp_path / "b", "--to", "fp8", *options)
    expected = contents(tmp_path / "a")
    found = contents(tmp_path / "b")
    del expected["plan"], found["plan"]
    assert found == expected
