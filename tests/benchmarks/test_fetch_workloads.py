from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fetch.plan import FetchBench, Participants, plan_sections
from benchmarks.fetch.workloads import Workload, draw_calls


@st.composite
def workloads(draw):
    rows = draw(st.integers(1, 5000))
    blocks = draw(st.integers(1, rows))
    pool = draw(st.integers(1, blocks))
    return Workload("w", draw(st.sampled_from(["random", "contiguous", "listed"])), blocks, pool), rows


@given(workloads(), st.integers(0, 99))
def test_no_row_is_asked_for_twice_and_all_are_in_the_store(drawn, seed):
    workload, rows = drawn
    calls = draw_calls(workload, rows, seed)
    ids = np.concatenate(calls)
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < rows
    assert all(len(call) == workload.pool for call in calls[:-1])
    if workload.pattern != "listed":
        assert len(ids) == workload.blocks
    if workload.pattern == "contiguous":
        assert (np.diff(ids) == 1).all()
    again = draw_calls(workload, rows, seed)
    assert all((one == two).all() for one, two in zip(calls, again, strict=True))


def test_another_repeat_asks_for_other_rows():
    workload = Workload("w", "random", 1000, 100)
    first, second = (np.concatenate(draw_calls(workload, 100_000, seed)) for seed in (0, 1))
    assert len(np.intersect1d(first, second)) < 100


def test_rows_in_list_order_lie_in_few_runs():
    def runs(pattern):
        workload = Workload("w", pattern, 1000, 100)
        return max((np.diff(np.sort(ids)) > 79).sum() for ids in draw_calls(workload, 100_000, 3))

    assert runs("listed") <= 32
    assert runs("random") > 80


def test_a_plan_never_asks_for_more_than_half_the_rows_and_labels_are_unique():
    participants = Participants("fio", ("np.memmap", "tensorstore"), ("auto", "buffered"))
    for rows in (2, 50, 300, 1_000_000):
        sections = plan_sections(FetchBench(scratch=None, memory_cap=1 << 30), rows, participants)
        assert len({section.name for section in sections}) == len(sections)
        for section in sections:
            labels = [entry.label for entry in section.entries]
            assert len(set(labels)) == len(labels)
            assert all(1 <= entry.workload.blocks <= rows / 2 for entry in section.entries)
            assert all(entry.workload.pool <= entry.workload.blocks for entry in section.entries)
    assert participants.primary == "edje auto"
