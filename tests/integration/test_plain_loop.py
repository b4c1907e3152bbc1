"""A search gives the scores and the order of a plain float32 loop over pairs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from edje_index.bundles.shipped_model import (
    IMAGE_TOWER,
    SHIPPED_MODEL,
    TEXT_TOWER,
    unpack_model,
)
from edje_index.search.token_index import TokenIndex
from pipelines import build_index
from tests.conftest import REPO, golden_index
from tests.integration.plain_loop import PlainLoop

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
DATA = Path(os.environ.get("EDJE_SHARED", REPO.parent / "shared")) / "data"
PHOTOS = 40
QUERIES = 20
POOL = 20
TOLERANCE = 1e-4


def check_same(root, model, texts, pool):
    """Every query has the same order of rows, and parts of scores that are equal to
    1e-4.

    A final score is a sum of weighted parts in float32, so its error grows with the
    size of the terms.
    """
    loop = PlainLoop(root, model)
    index = TokenIndex.open(root, model, dtype="float32")
    for text, hits in zip(texts, index.search(texts, pool, pool), strict=True):
        expected = loop.search(text, pool)
        assert [hit.row_id for hit in hits] == [row for row, _, _ in expected], text
        for hit, (_, score, parts) in zip(hits, expected, strict=True):
            assert hit.parts == pytest.approx(
                {part: parts[part] for part in hit.parts}, abs=TOLERANCE, rel=0
            )
            terms = sum(
                abs(weight * parts[part]) for part, weight in loop.weights.items()
            )
            assert hit.score == pytest.approx(
                score, abs=max(TOLERANCE, 1e-6 * terms), rel=0
            )


def captions_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_golden_queries():
    texts = [
        caption
        for line in captions_of(GOLDEN / "captions.jsonl")
        for caption in line["captions"]
    ]
    check_same(golden_index(), GOLDEN / "model", texts, 12)


@pytest.mark.slow
@pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the photos and base towers of EDJE_SHARED"
)
def test_real_queries(tmp_path):
    towers = {
        name: load_file(DATA / "weights" / name / "model.safetensors")
        for name in (IMAGE_TOWER, TEXT_TOWER)
    }
    unpack_model(SHIPPED_MODEL, towers, tmp_path / "model")
    items = captions_of(DATA / "flickr8k" / "captions_dev.jsonl")[:PHOTOS]
    paths = tmp_path / "photos.csv"
    paths.write_text(
        "path\n" + "".join(f"{DATA / 'flickr8k' / item['image']}\n" for item in items)
    )
    build_index(paths, tmp_path / "photos.edje", tmp_path / "model", engine="inline")
    texts = [item["captions"][0] for item in items[:QUERIES]]
    check_same(tmp_path / "photos.edje", tmp_path / "model", texts, POOL)
