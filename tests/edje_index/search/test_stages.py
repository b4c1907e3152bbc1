"""Every search measures its stages."""

from __future__ import annotations

import time

import pytest

from edje_index.search.stages import STAGES, Stages
from edje_index.search.token_index import TokenIndex
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1"
SEARCHED = ["text_tower", "nearest", "fetch", "joint_encoder", "other_parts", "hits", "total"]


@pytest.fixture(scope="module")
def index() -> TokenIndex:
    return TokenIndex.open(GOLDEN / "index", GOLDEN / "model")


def test_a_stage_takes_its_share_of_the_total():
    stages = Stages()
    for _ in range(2):
        with stages.timed("fetch"):
            time.sleep(0.01)
    time.sleep(0.01)
    seconds = stages.seconds()
    assert seconds["fetch"] >= 0.02
    assert seconds["total"] >= seconds["fetch"] + 0.01


@pytest.mark.parametrize(
    ("search", "names"),
    [
        (lambda index: index.search("a dog", 3, 6), SEARCHED),
        (lambda index: index.search("a dog", 3, 6, score="logit"), [name for name in SEARCHED if name[:5] != "other"]),
        (lambda index: index.search("a dog", 3, rerank=False), ["text_tower", "nearest", "hits", "total"]),
        (lambda index: index.rerank("a dog", [4, 0]), [name for name in SEARCHED if name != "nearest"]),
        (lambda index: index.search_row(4, 3), ["nearest", "hits", "total"]),
    ],
)
def test_the_stages_that_ran_add_up_to_the_total(index, search, names):
    started = time.perf_counter()
    hits = search(index)
    elapsed = time.perf_counter() - started
    assert list(hits.stages) == names
    assert set(names) <= set(STAGES)
    parts = [seconds for name, seconds in hits.stages.items() if name != "total"]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= hits.stages["total"] <= elapsed


def test_queries_of_one_call_share_the_stages(index):
    first, second = index.search(["a dog", "two dogs"], 2, 4)
    assert first.stages == second.stages
    assert first.first(1).stages == first.stages
