from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fetch.report import discarded
from benchmarks.fetch.summary import amplification, cpu_per_block, page_amplification, paired_ratio, rate, summarise
from benchmarks.fetch.targets import judge

positive = st.floats(1e-3, 1e3)


@st.composite
def series(draw, least=1):
    return [
        {
            "repeat": repeat,
            "discarded": draw(st.sampled_from([None, None, "not cold"])),
            "blocks": draw(st.integers(1, 1000)),
            "seconds": draw(positive),
            "cpu_seconds": draw(positive),
            "read_bytes": 8192,
            "page_bytes": 4096,
            "asked_bytes": 2048,
            "latencies": draw(st.lists(positive, min_size=1, max_size=5)),
        }
        for repeat in range(draw(st.integers(least, 6)))
    ]


@given(series())
def test_a_subject_is_as_fast_as_itself(runs):
    counted = [run for run in runs if not run["discarded"]]
    assert paired_ratio(runs, runs, rate) == (pytest.approx(1.0) if counted else None)


@given(series(), positive)
def test_a_slower_disk_moves_rates_and_no_ratio(runs, factor):
    slower = [{**run, "seconds": run["seconds"] * factor} for run in runs]
    other = [{**run, "seconds": 2.0 * run["seconds"]} for run in runs]
    other_slower = [{**run, "seconds": 2.0 * run["seconds"]} for run in slower]
    assert paired_ratio(runs, other, rate) == pytest.approx(paired_ratio(slower, other_slower, rate))


@given(series())
def test_discarded_runs_count_nowhere(runs):
    spoilt = [{**run, "seconds": 1e9, "latencies": [1e9]} if run["discarded"] else run for run in runs]
    assert summarise(spoilt, 10) == summarise(runs, 10)
    found = summarise(runs, 10)
    assert found["runs"] + found["discarded"] == len(runs)


@given(series(least=2))
def test_figures_are_in_order(runs):
    found = summarise([{**run, "discarded": None} for run in runs], 4096)
    low, high = found["gb_per_s_range"]
    assert low <= found["gb_per_s"] <= high
    assert found["gb_per_s"] == pytest.approx(found["blocks_per_s"] * 4096 / 1e9)
    assert (found["amplification"], found["page_amplification"]) == (4.0, 2.0)
    if "latency_ms" in found:
        assert found["latency_ms"]["p50"] <= found["latency_ms"]["p95"] <= found["latency_ms"]["p99"]


def run(seconds, repeat=0, **changes):
    fixed = {"discarded": None, "blocks": 100, "cpu_seconds": seconds / 2}
    read = {"read_bytes": 4096, "page_bytes": 4096, "asked_bytes": 4000}
    return {"repeat": repeat, "seconds": seconds, "latencies": [seconds], **fixed, **read, **changes}


def test_ratios_are_of_the_same_repeat():
    ours = [run(1.0, 0), run(10.0, 1), run(2.0, 2)]
    theirs = [run(2.0, 0), run(20.0, 1), run(1.0, 2, discarded="not cold")]
    assert paired_ratio(ours, theirs, rate) == 2.0
    assert paired_ratio(ours, theirs, cpu_per_block) == 0.5
    assert page_amplification(ours[0]) == 1.0 < amplification(ours[0])


def test_marks_say_what_is_met_and_leave_out_what_was_not_measured():
    sections = {
        "cold random": {"edje": [run(1.0)], "device": [run(0.8)], "lance": [run(6.0)], "tensorstore": [run(1.5)]},
        "warm random": {"edje": [run(1.0)], "memcpy": [run(0.7)]},
    }
    marks = {mark["mark"]: mark for mark in judge("bf16", sections, "edje")}
    assert set(marks) == {
        "cold random, of the device's rate",
        "cold random, of TensorStore",
        "CPU a block, cold random, of TensorStore",
        "cold random, of Lance",
        "warm random, of memcpy",
        "bytes read, of the asked pages",
    }
    met = {name for name, mark in marks.items() if mark["met"]}
    assert met == {
        "cold random, of TensorStore",
        "cold random, of Lance",
        "warm random, of memcpy",
        "bytes read, of the asked pages",
    }
    sections["cold random"]["edje, as many as lance"] = [run(3.0)]
    assert {mark["mark"]: mark for mark in judge("bf16", sections, "edje")}["cold random, of Lance"]["measured"] == 2
    assert "warm random, of memcpy" not in {mark["mark"] for mark in judge("fp8", sections, "edje")}


def test_every_discarded_run_is_listed():
    entries = {"edje": {"runs": [run(1.0, 0), run(1.0, 1, discarded="not cold: 9.0% ...")]}}
    report = {"precisions": {"bf16": {"sections": {"cold random": {"entries": entries}}}}}
    assert discarded(report) == ["bf16, cold random, edje, repeat 2: not cold: 9.0% ..."]
