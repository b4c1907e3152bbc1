"""`edje-index quantize` as a user runs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from pipelines import delete_rows, quantize_index
from pipelines.jobs.plan import disk_need
from pipelines.jobs.quantize import precision_to_read
from pipelines.progress.wording import human_bytes
from storage_formats import TokenStore, UsageError, codec, precisions, verify_index
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import Manifest
from tests.command_line import run_here
from tests.conftest import same_bits, write_random_index
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
    common = [
        "--model",
        case / "model",
        "--engine",
        "inline",
        "--shard-size",
        8,
        "--threads",
        1,
    ]
    return run_here("build", case / "photos", "--out", out, *common, *options)


def test_quantize_resumes_repeats_and_drops(case, tmp_path):
    build(case, tmp_path / "a")
    first = run_here("quantize", tmp_path / "a", "--to", "fp8", "--to", "sign1")
    assert (first["source"], first["added"], first["precisions"]) == (
        "bf16",
        ["fp8", "sign1"],
        ["bf16", "fp8", "sign1"],
    )
    assert first["bytes_per_image"]["bf16"] == 128
    again = run_here("quantize", tmp_path / "a", "--to", "fp8")
    assert (again["source"], again["added"]) == (None, [])
    dropped = run_here("quantize", tmp_path / "a", "--to", "fp8", "--drop", "bf16")
    assert (dropped["dropped"], dropped["precisions"]) == (["bf16"], ["fp8", "sign1"])
    assert verify_index(tmp_path / "a") == []
    for options, words in [
        (["--drop", "fp8", "--drop", "sign1"], "without tokens"),
        (["--to", "fp8", "--drop", "fp8"], "fp8 cannot be both added and dropped"),
        *(
            ([option, "fp3", "--to", "fp8"], "unknown precision 'fp3'")
            for option in ("--to", "--drop", "--from")
        ),
        (["--to", "int8", "--from", "bf16"], "does not have precision 'bf16'"),
    ]:
        assert (
            words in run_here("quantize", tmp_path / "a", *options, expect=2)["error"]
        )
    assert (
        "there is no index"
        in run_here("quantize", tmp_path / "b", "--to", "fp8", expect=2)["error"]
    )


def test_the_order_of_precisions_does_not_matter_to_a_resumed_conversion(tmp_path):
    write_random_index(tmp_path, SPEC)
    stop_after_one_shard(quantize_index, tmp_path, ["fp8", "int8"])
    plans = []
    quantize_index(tmp_path, ["int8", "fp8"], on_event=plans.append)
    # each thread finishes its shard
    assert plans[0].finished_shards >= 1
    assert verify_index(tmp_path) == []


def test_resuming_needs_disk_for_what_is_left_alone(case, tmp_path, monkeypatch):
    build(case, tmp_path / "a")
    stop_after_one_shard(quantize_index, tmp_path / "a", ["fp8"])
    spec = Manifest.load(tmp_path / "a").spec
    receipts = Layout(tmp_path / "a").receipts.iterdir()
    left = {*spec.shard_numbers()} - {int(path.stem) for path in receipts}
    assert 0 < len(left) < 4
    rows = sum(len(spec.shard_rows(shard)) for shard in left)
    spec = replace(spec, rows=rows, segments=(), precisions=("fp8",))
    need = disk_need(spec)["tokens"]
    monkeypatch.setattr("pipelines.jobs.plan.free_disk", lambda _: need - 1)
    with pytest.raises(UsageError, match=rf"shards? to fp8 needs {human_bytes(need)} "):
        quantize_index(tmp_path / "a", ["fp8"])
    monkeypatch.setattr("pipelines.jobs.plan.free_disk", lambda _: need)
    assert quantize_index(tmp_path / "a", ["fp8"]).added == ("fp8",)


def test_every_precision_holds_the_records_of_its_codec(tmp_path):
    expected = write_random_index(tmp_path, SPEC, failed=frozenset({3}))
    targets = [name for name in precisions() if name != "bf16"]
    quantize_index(tmp_path, targets)
    assert verify_index(tmp_path) == []
    kept = [row for row in range(SPEC.rows) if row != 3]
    for name in targets:
        entry = codec(name, SPEC.block_shape)
        store = TokenStore.open(tmp_path, name)
        blocks = store.fetch(range(SPEC.rows))
        assert same_bits(blocks[kept], entry.decode(entry.encode(expected[kept])))
        assert np.flatnonzero(store.holes(blocks)).tolist() == [3]


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


def test_a_conversion_and_a_build_give_the_same_bytes(case, tmp_path):
    build(case, tmp_path / "a", "--precision", "bf16", "--precision", "fp8")
    build(case, tmp_path / "b")
    run_here("quantize", tmp_path / "b", "--to", "fp8")
    expected = contents(tmp_path / "a")
    found = contents(tmp_path / "b")
    del expected["plan"], found["plan"]
    assert found == expected


def test_the_files_of_an_earlier_snapshot_are_not_replaced_by_other_tokens(tmp_path):
    spec = replace(SPEC, precisions=("bf16", "fp8"))
    write_random_index(tmp_path / "i", spec)
    quantize_index(tmp_path / "i", ["int8"])
    expected = TokenStore.open(tmp_path / "i", "int8").fetch([1, 8])
    delete_rows(tmp_path / "i", rows=[2])
    quantize_index(tmp_path / "i", drop=["int8"])
    with pytest.raises(UsageError, match="may have other tokens in 'int8'"):
        quantize_index(tmp_path / "i", ["int8"], source="fp8")
    # from the same precision, the tokens are the same
    quantize_index(tmp_path / "i", ["int8"])
    assert same_bits(TokenStore.open(tmp_path / "i", "int8").fetch([1, 8]), expected)
    assert verify_index(tmp_path / "i") == []
