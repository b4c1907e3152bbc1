"""`quantize --report`: what it measures, what it writes, and that it leaves the
index alone.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.evaluation.quantization import RECOMMENDED, measure_precisions
from edje_index.evaluation.report import quantization_report
from pipelines.cli import main
from storage_formats import IndexSpec, codec
from tests.command_line import run_here
from tests.conftest import write_random_index
from tests.integration.builds import make_photos

SPEC = IndexSpec(
    rows=50, shard_size=16, block_shape=(8, 64), embed_dim=6, precisions=("bf16", "fp8")
)
HOLES = frozenset({3, 17, 49})


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """An index without a model, in two precisions, and its blocks."""
    root = tmp_path_factory.mktemp("report") / "index"
    return root, write_random_index(root, SPEC, failed=HOLES)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of photos by a tiny model."""
    folder = tmp_path_factory.mktemp("report_built")
    make_photos(folder / "photos", 30)
    create_untrained_bundle(folder / "model", sizes=TINY)
    options = [
        "--model",
        folder / "model",
        "--engine",
        "inline",
        "--shard-size",
        8,
        "--threads",
        1,
    ]
    run_here("build", folder / "photos", "--out", folder / "index", *options)
    return folder / "index"


def files(root):
    return {
        path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def test_token_errors_of_stored_and_unstored_precisions(synthetic):
    root, blocks = synthetic
    before = files(root)
    report = measure_precisions(root, "bf16", ["fp8", "sign1"])
    assert files(root) == before
    kept = blocks[[row for row in range(SPEC.rows) if row not in HOLES]]
    assert (report.reference, report.sampled_rows, report.holes) == ("bf16", 50, 3)
    assert [(cost.name, cost.stored) for cost in report.precisions] == [
        ("fp8", True),
        ("sign1", False),
    ]
    exact = kept.astype(np.float64)
    for cost in report.precisions:
        entry = codec(cost.name, SPEC.block_shape)
        assert cost.bytes_per_image == entry.record_bytes
        error = entry.decode(entry.encode(kept)).astype(np.float64) - exact
        assert cost.relative_error == pytest.approx(
            np.linalg.norm(error) / np.linalg.norm(exact)
        )
        assert (cost.first_kept, cost.loss) == (None, None)
    assert report.ranking_left_out == "the index was not built by a model"
    assert report.advice is None
    page = quantization_report(report)
    assert "Re-ranking was not measured: the index was not built by a model." in page
    # without names: what the index stores
    found = measure_precisions(root, "bf16").precisions
    assert [cost.name for cost in found] == ["fp8"]


def test_rankings_of_an_index_with_a_model(built, tmp_path):
    left_out = measure_precisions(built, "bf16", ["sign1"]).ranking_left_out
    assert left_out == "advice needs queries, and the index holds no captions"
    queries = tmp_path / "queries.txt"
    queries.write_text("a dog\na cat\n")
    report = measure_precisions(built, "bf16", queries=queries, pool=12)
    assert (report.query_source, report.queries, report.trained) == (
        str(queries),
        2,
        False,
    )
    assert {cost.name for cost in report.precisions} == set(RECOMMENDED)
    assert report.advice is None
    for cost in report.precisions:
        assert cost.loss is None
        assert cost.first_kept.value in (0, 50, 100)
    page = quantization_report(report)
    assert "have no meaning" in page


def test_stored_captions_are_the_queries(built, tmp_path):
    """The recall is that of `eval` with the same captions and pool."""
    photos = sorted((built.parent / "photos").iterdir())
    table = tmp_path / "photos.csv"
    lines = [f"{path},photo {number}" for number, path in enumerate(photos)]
    table.write_text("path,caption\n" + "\n".join(lines) + "\n")
    options = ["--model", built.parent / "model", "--engine", "inline"]
    run_here("build", table, "--out", tmp_path / "index", *options)
    report = measure_precisions(tmp_path / "index", "bf16", ["sign1"], pool=10)
    assert report.query_source == "captions of the index"
    captions = tmp_path / "captions.jsonl"
    items = [
        {"image": str(path), "captions": [f"photo {number}"]}
        for number, path in enumerate(photos)
    ]
    captions.write_text("".join(json.dumps(item) + "\n" for item in items))
    arguments = ["--precision", "bf16", "--precision", "sign1", "--pool", 10]
    found = run_here("eval", tmp_path / "index", captions, *arguments)["results"]
    reranked = {
        result["precision"]: result
        for result in found
        if result["direction"] == "t2i" and "precision" in result
    }
    recall = {name: each["recall"]["1"]["value"] for name, each in reranked.items()}
    assert report.recall.value == pytest.approx(recall["bf16"])
    (sign1,) = report.precisions
    assert sign1.loss.value == pytest.approx(recall["bf16"] - recall["sign1"])
    kept = reranked["sign1"]["first_kept"]["value"]
    assert sign1.first_kept.value == pytest.approx(kept)


def test_the_command_prints_writes_and_changes_nothing(synthetic, tmp_path, capsys):
    root, _ = synthetic
    before = files(root)
    assert main(["quantize", str(root), "--report"]) == 0
    out = capsys.readouterr().out
    assert "| precision | bits per value | bytes per image |" in out
    assert (
        main(
            [
                "quantize",
                str(root),
                "--report",
                str(tmp_path / "out"),
                "--json",
            ]
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out/report.json").read_text())
    assert files(root) == before
    (tmp_path / "file").write_text("")
    assert main(["quantize", str(root), "--report", str(tmp_path / "file")]) == 2


def test_wrong_usage(synthetic, capsys):
    for arguments, words in (
        ([], "give --to, --drop or --report"),
        (["--to", "fp8", "--model", "m"], "--model need --report"),
        (["--to", "fp3", "--report"], "unknown precision 'fp3'"),
        (["--from", "nvfp4", "--report"], "does not have precision 'nvfp4'"),
    ):
        assert main(["quantize", str(synthetic[0]), *arguments]) == 2
        assert words in capsys.readouterr().err
