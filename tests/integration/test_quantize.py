"""`edje-index quantize` as a user runs it."""

from __future__ import annotations

import pytest

from edje_index.untrained import TINY, create_untrained_bundle
from storage_formats import verify_index
from tests.integration.builds import contents, make_photos, run


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    make_photos(folder / "photos", 30)
    create_untrained_bundle(folder / "model", sizes=TINY)
    return folder


def build(case, out, *options):
    common = ["--model", case / "model", "--engine", "inline", "--shard-size", 8, "--threads", 1]
    return run("build", case / "photos", "--out", out, *common, *options)


def test_quantize_resumes_repeats_and_drops(case, tmp_path):
    build(case, tmp_path / "a")
    first = run("quantize", tmp_path / "a", "--to", "fp8", "--to", "sign1")
    assert (first["source"], first["added"], first["precisions"]) == (
        "bf16",
        ["fp8", "sign1"],
        ["bf16", "fp8", "sign1"],
    )
    assert first["bytes_per_image"]["bf16"] == 128
    again = run("quantize", tmp_path / "a", "--to", "fp8")
    assert (again["source"], again["added"]) == (None, [])
    dropped = run("quantize", tmp_path / "a", "--to", "fp8", "--drop", "bf16")
    assert (dropped["dropped"], dropped["precisions"]) == (["bf16"], ["fp8", "sign1"])
    assert verify_index(tmp_path / "a") == []
    assert (
        "without tokens"
        in run("quantize", tmp_path / "a", "--to", "fp8", "--drop", "fp8", "--drop", "sign1", expect=2)["error"]
    )
    assert "unknown precision 'fp3'" in run("quantize", tmp_path / "a", "--to", "fp3", expect=2)["error"]
    assert "there is no index" in run("quantize", tmp_path / "b", "--to", "fp8", expect=2)["error"]


def test_engines_and_build_give_the_same_bytes(case, tmp_path):
    build(case, tmp_path / "a", "--precision", "bf16", "--precision", "fp8")
    for engine in ("inline", "ray"):
        build(case, tmp_path / engine)
        run("quantize", tmp_path / engine, "--to", "fp8", "--engine", engine)
    expected = contents(tmp_path / "a")
    expected.pop("plan")
    for engine in ("inline", "ray"):
        found = contents(tmp_path / engine)
        found.pop("plan")
        assert found == expected
