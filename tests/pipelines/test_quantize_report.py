"""`quantize --report`: what it measures, what it writes, and that it leaves the
index alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from edje_index.bundles.random_bundle import TINY, create_untrained_bundle
from edje_index.evaluation.quantization import compare_tokens, measure_precisions
from edje_index.evaluation.report import quantization_report, write_report
from pipelines.cli import main
from storage_formats import IndexSpec, TokenStore, codec
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
    report = measure_precisions(root, "bf16")
    assert files(root) == before
    kept = blocks[[row for row in range(SPEC.rows) if row not in HOLES]]
    assert (report.reference, report.sampled_rows, report.holes) == ("bf16", 50, 3)
    assert {cost.name for cost in report.precisions if cost.stored} == {"fp8"}
    assert [cost.bytes_per_image for cost in report.precisions] == sorted(
        (codec(cost.name, SPEC.block_shape).record_bytes for cost in report.precisions),
        reverse=True,
    )
    for cost in report.precisions:
        entry = codec(cost.name, SPEC.block_shape)
        errors, cosines = compare_tokens(kept, entry.decode(entry.encode(kept)))
        assert cost.relative_error.count == len(kept) * 8
        assert cost.relative_error.p99 == pytest.approx(np.percentile(errors, 99))
        assert cost.relative_error.highest == errors.max()
        assert cost.cosine.lowest == cosines.min()
        assert cost.ranking is None
    assert report.ranking_left_out == "the index was not built by a model"
    assert (
        "Re-ranking was not measured: the index was not built by a model."
        in quantization_report(report)
    )


def test_rankings_of_an_index_with_a_model(built, tmp_path):
    queries = tmp_path / "queries.txt"
    queries.write_text("a dog\na cat\n")
    report = measure_precisions(built, "bf16", queries=queries, pool=12)
    assert (report.query_source, report.queries, report.trained) == (
        str(queries),
        2,
        False,
    )
    # tokens of width 16
    assert set(report.impossible) == {"mxfp8", "mxfp4"}
    found = {cost.name: cost.ranking for cost in report.precisions}
    assert found["sign1"].score_change > found["fp8"].score_change > 0
    assert all(
        change.queries == 2 and change.kendall_tau.highest <= 1
        for change in found.values()
    )
    by_hand = _scores_by_hand(built, "a dog", 12)
    assert found["int8"].score_change == pytest.approx(
        np.mean([by_hand, _scores_by_hand(built, "a cat", 12)]), rel=1e-3
    )
    page = quantization_report(report)
    write_report(tmp_path / "out", page, asdict(report))
    assert (tmp_path / "out/report.md").read_text() == page
    assert json.loads((tmp_path / "out/report.json").read_text()) == json.loads(
        json.dumps(asdict(report))
    )
    widths = {
        line.count("|") for line in page.splitlines() if line.startswith("| nvfp4")
    }
    # cells of the tables of sizes, distributions and rankings
    assert widths == {5, 9, 8}
    assert "have no meaning" in page


def _scores_by_hand(root, text, pool):
    """Mean |change of score| of int8, from the parts of a search."""
    from edje_index.search.token_index import TokenIndex

    index = TokenIndex.open(root)
    rows = [hit.row_id for hit in index.search(text, pool, pool)]
    blocks = TokenStore.open(root).fetch(rows)
    entry = codec("int8", (4, 16))
    change = index.model.joint.score(text, blocks) - index.model.joint.score(
        text, entry.decode(entry.encode(blocks))
    )
    return float(change.abs().mean())


def test_the_command_prints_writes_and_changes_nothing(synthetic, tmp_path, capsys):
    root, _ = synthetic
    before = files(root)
    assert main(["quantize", str(root), "--report", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "| precision | bytes per image |" in out
    assert (
        main(
            [
                "quantize",
                str(root),
                "--report",
                str(tmp_path / "out"),
                "--json",
                "--quiet",
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
        (["--to", "fp8", "--model", "m"], "--model needs --report"),
        (["--to", "fp3", "--report"], "unknown precision 'fp3'"),
        (["--from", "nvfp4", "--report"], "does not have precision 'nvfp4'"),
    ):
        assert main(["quantize", str(synthetic[0]), *arguments]) == 2
        assert words in capsys.readouterr().err
