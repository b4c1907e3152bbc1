"""Search and evaluation give the same final scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edje_index.bundles.bundle import ModelBundle
from edje_index.evaluation import evaluate as evaluation
from edje_index.scoring.weights import ScoreWeights
from edje_index.search.token_index import TokenIndex
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
INDEX, MODEL = GOLDEN / "index", GOLDEN / "model"
QUERY = "a dog plays in the snow"


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    return ModelBundle.load(MODEL)


def evaluation_scores(weights: ScoreWeights, captions: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Final scores [p] of the pool of the only query."""
    captured, score_pools = [], evaluation.score_pools

    def capture(models, its_weights, eval_set, embeddings, pools, source, **options):
        scores, pairs = score_pools(models, its_weights, eval_set, embeddings, pools, source, **options)
        captured.append((pools["t2i"].candidates, scores["t2i"][20]))
        return scores, pairs

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "score_pools", capture)
        evaluation.evaluate(
            INDEX,
            captions,
            model=MODEL,
            images=Path("/photos"),
            precisions=("bf16",),
            pools=(20,),
            directions=("t2i",),
            full=True,
            score=weights,
            resamples=0,
        )
    ((candidates, scores),) = captured
    return scores[0][np.argsort(candidates[0])]


@pytest.fixture
def one_caption(tmp_path) -> Path:
    """A caption file with `QUERY` for the first image of the golden captions."""
    first = json.loads((GOLDEN / "captions.jsonl").read_text().splitlines()[0])
    path = tmp_path / "captions.jsonl"
    path.write_text(json.dumps({**first, "captions": [QUERY]}) + "\n")
    return path


def test_search_and_evaluation_have_the_same_scores(bundle, one_caption, monkeypatch):
    weights = replace(bundle.score.t2i, logit=30.0)
    hits = TokenIndex.open(INDEX, MODEL).search(QUERY, k=20, pool=20, score=weights)
    evaluated = evaluation_scores(weights, one_caption, monkeypatch)
    np.testing.assert_allclose(evaluated, [hit.score for hit in sorted(hits, key=lambda hit: hit.row_id)], atol=1e-5)
