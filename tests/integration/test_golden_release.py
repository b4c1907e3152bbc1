"""An index and a bundle that release 0.1 wrote: today's code reads them and answers
as it did.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edje_index import evaluate
from storage_formats import TokenStore
from tests.command_line import run_here
from tests.conftest import REPO, golden_index

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
INDEX = golden_index()
MODEL = GOLDEN / "model"
# weight of the embedding similarity in the bundle
EMBEDDING_WEIGHT = 1.5


def expected(name):
    return json.loads((GOLDEN / name).read_text())


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_blocks_have_the_same_bits(precision):
    blocks = TokenStore.open(INDEX, precision).fetch(range(12))
    assert blocks.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        blocks.view(np.uint16), np.load(GOLDEN / "blocks.npz")[precision]
    )


@pytest.mark.parametrize("pool", ["4", "20"])
def test_search_gives_the_same_hits_and_scores(pool):
    options = ("-k", pool, "--pool", pool, "--model", MODEL)
    found = run_here("search", INDEX, "a dog plays in the snow", *options)["hits"]
    wanted = expected(f"search-{pool}.json")["hits"]
    for hit in wanted:
        # release 0.1 also subtracted a hubness correction
        hit["score"] = hit["joint_score"] + EMBEDDING_WEIGHT * hit["embedding_score"]
    wanted.sort(key=lambda hit: -hit["score"])
    assert [hit["uri"] for hit in found] == [hit["uri"] for hit in wanted]
    for name in ("score", "embedding_score", "joint_score"):
        assert [hit[name] for hit in found] == pytest.approx(
            [hit[name] for hit in wanted], abs=1e-5
        )


def test_evaluation_gives_the_same_recall():
    evaluation = evaluate(
        INDEX,
        GOLDEN / "captions.jsonl",
        images=Path("/photos"),
        model=MODEL,
        pools=(4, 10),
        resamples=0,
    )
    found = json.loads(json.dumps(evaluation.to_json()))
    wanted = expected("eval-without-hubness.json")
    assert found["inputs"] == wanted["inputs"]
    for result, earlier in zip(found["results"], wanted["results"], strict=True):
        # Release 0.1 named the index in each result. Later releases say more.
        del earlier["system"]
        assert {name: result[name] for name in earlier} == earlier
        assert set(result) - set(earlier) <= {"change_from"}
