"""The sentence of an evaluation that names the precision to keep."""

from dataclasses import replace

import pytest

from edje_index.evaluation.evaluate import Evaluation, Result
from edje_index.evaluation.recall import Estimate
from edje_index.evaluation.report import evaluation_report


def evaluation(*changes, queries=300, trained=True):
    """An evaluation of bf16 and of precisions, each with its bytes per image and its
    change of R@1 and half of the interval of the change.
    """
    results = [Result("t2i", {1: Estimate(60.0)})]
    reranked = (("bf16", 49152, None, 0), *changes)
    for direction in ("t2i", "i2t"):
        for pool in (10, 50):
            for name, size, change, spread in reranked:
                # The advice is about text-to-image search with the largest pool.
                is_read = (direction, pool) == ("t2i", 50)
                value = change if is_read or change is None else -50.0
                estimate = value and Estimate(value, value - spread, value + spread)
                results.append(
                    Result(
                        direction,
                        {1: Estimate(70.0)},
                        name,
                        None,
                        size,
                        pool,
                        Estimate(90.0),
                        {1: Estimate(10.0)},
                        None if estimate is None else {1: estimate},
                    )
                )
    counts = {"t2i": queries, "i2t": queries}
    inputs = {"images": 300, "used": 300, "missing": {}, "captions": 300}
    return Evaluation(
        *("split", "c", None, (1,), (10, 50), 9, 0),
        *({**inputs, "captions_used": 300}, "a", "a", "b", "f", trained, (64, 384)),
        *({}, counts, counts, "float32", tuple(results), 1.0),
    )


FP8 = ("fp8", 24640, -0.01, 0.4)
NVFP4 = ("nvfp4", 13824, -0.2, 0.4)
SIGN1 = ("sign1", 3200, -6.0, 0.4)


@pytest.mark.parametrize(
    ("changes", "kept", "next_change"),
    [
        (
            [FP8, NVFP4, SIGN1],
            "nvfp4: 13.8 kB per image, -0.2 points of R@1 (-0.6 to +0.2)",
            "sign1",
        ),
        # Its interval reaches beyond a point.
        (
            [FP8, (*NVFP4[:3], 0.9)],
            "fp8: 24.6 kB per image, -0.0 points of R@1 (-0.4 to +0.4)",
            "nvfp4",
        ),
        ([SIGN1], "bf16: 49.2 kB per image, +0.0 points", "sign1"),
    ],
)
def test_the_smallest_precision_that_loses_no_more_than_a_point_is_kept(
    changes, kept, next_change
):
    compared = evaluation(*changes)
    sentence = compared.to_json()["advice"]
    assert sentence.startswith(f"keep {kept}")
    assert f"; {next_change} would change" in sentence
    assert f"**{sentence}**" in evaluation_report(compared)


def test_few_queries_and_an_untrained_model_give_no_advice():
    assert evaluation(NVFP4, queries=299).advice.startswith("no advice: 299 queries")
    for compared in (evaluation(), evaluation(NVFP4, trained=False)):
        assert compared.advice is None
        assert "**" not in evaluation_report(compared)


def test_a_pool_that_cannot_change_the_first_hit_gives_no_advice():
    compared = replace(evaluation(NVFP4), pools=(1,))
    results = [replace(each, pool=each.pool and 1) for each in compared.results]
    assert replace(compared, results=tuple(results)).advice == (
        "no advice: a pool of 1 cannot change R@1"
    )
