"""Comparison of rankings at two precisions, and the advice that follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from edje_index.evaluation.quantization import PrecisionCost, _queries, advice
from edje_index.evaluation.recall import Estimate
from storage_formats import IndexWriter
from storage_formats.format.manifest import CommittedIndex


def cost(name, size, loss, spread=0.4):
    estimate = Estimate(loss, loss - spread, loss + spread)
    return PrecisionCost(name, False, size, 0.1, Estimate(100 - loss), estimate)


def test_the_smallest_precision_that_loses_no_more_than_a_point_is_kept():
    costs = [
        cost("fp8", 24640, 0.0),
        cost("nvfp4", 13824, 0.2),
        cost("sign1", 3200, 6.0),
    ]
    assert advice("bf16", 49152, costs, 300) == (
        "keep nvfp4: 13.8 kB per image, loses 0.2 points of R@1 (-0.2 to +0.6);"
        " sign1 would lose 6.0 points of R@1 (+5.6 to +6.4, the limit is +1.0)"
    )
    # its interval reaches beyond a point
    costs[1] = cost("nvfp4", 13824, 0.0, spread=1.2)
    assert advice("bf16", 49152, costs, 300) == (
        "keep fp8: 24.6 kB per image, loses 0.0 points of R@1 (-0.4 to +0.4);"
        " nvfp4 would lose 0.0 points of R@1 (-1.2 to +1.2, the limit is +1.0)"
    )
    assert advice("bf16", 49152, [cost("sign1", 3200, 6.0)], 300) == (
        "keep bf16: 49.2 kB per image;"
        " sign1 would lose 6.0 points of R@1 (+5.6 to +6.4, the limit is +1.0)"
    )
    assert advice("bf16", 49152, [], 300) is None
    unlabelled = PrecisionCost("nvfp4", True, 13824, 0.1, Estimate(98.0, 97.5, 99.0))
    assert advice("bf16", 49152, [unlabelled], 300) == (
        "keep nvfp4: 13.8 kB per image, changes 2.0 % of the first hits (+1.0 to +2.5)"
    )


def test_few_queries_give_no_advice():
    """No first hit changes, so the interval of the bootstrap is [0, 0]."""
    unchanged = cost("sign1", 3200, 0.0, spread=0.0)
    assert advice("bf16", 49152, [unchanged], 299) == (
        "no advice: 299 queries are too few, at least 300 are needed"
    )
    assert advice("bf16", 49152, [unchanged], 300).startswith("keep sign1")


def test_queries_are_a_sample_of_all_captions(tmp_path):
    rows = 1500
    captions = [[f"a {row}", f"b {row}"] for row in range(rows)]
    captions[7] = [" ", "b 7"]
    with IndexWriter.create(
        tmp_path / "index", block_shape=(1, 16), embed_dim=2, shard_size=512
    ) as writer:
        tokens = np.ones((rows, 1, 16), np.float32)
        names = [f"{row}.jpg" for row in range(rows)]
        writer.append(tokens, tokens[:, 0, :2], {"uri": names, "captions": captions})
    index = CommittedIndex.open(tmp_path / "index")
    texts, row_ids, _ = _queries(index, None)
    assert (texts, row_ids) == _queries(index, None)[:2]
    assert len({*texts}) == 1000
    assert all(text in captions[row] for text, row in zip(texts, row_ids, strict=True))
    assert np.mean(row_ids) == pytest.approx(rows / 2, rel=0.1)
    assert np.mean([text[0] == "a" for text in texts]) == pytest.approx(0.5, abs=0.1)
