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
            "requested_bytes": 2048,
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
    read = {"read_bytes": 4096, "page_bytes": 4096, "requested_bytes": 4000}
    return {"repeat": repeat, "seconds": seconds, "latencies": [seconds], **fixed, **read, **changes}


def test_ratios_are_of_the_same_repeat():
    ours = [run(1.0, 0), run(10.0, 1), run(2.0, 2)]
    theirs = [run(2.0, 0), run(20.0, 1), run(1.0, 2, discarded="not cold")]
    assert paired_ratio(ours, theirs, rate) == 2.0
    assert paired_ratio(ours, theirs, cpu_per_block) == 0.5
    assert page_amplification(ours[0]) == 1.0 < amplification(ours[0])


def test_targets_are_judged_if_their_peer_was_measured():
    sections = {
        "cold random": {"edje": [run(1.0)], "device": [run(0.8)], "lance": [run(6.0)], "tensorstore": [run(1.5)]},
        "warm random": {"edje": [run(1.0)], "memcpy": [run(0.7)]},
    }
    targets = {target["name"]: target for target in judge("bf16", sections, "edje")}
    assert set(targets) == {
        "cold random, relative to the device",
        "cold random, relative to TensorStore",
        "CPU per block, cold random, relative to TensorStore",
        "cold random, relative to Lance",
        "warm random, relative to memcpy",
        "bytes read, relative to the requested pages",
    }
    met = {name for name, target in targets.items() if target["met"]}
    assert met == {
        "cold random, relative to TensorStore",
        "cold random, relative to Lance",
        "warm random, relative to memcpy",
        "bytes read, relative to the requested pages",
    }
    sections["cold random"]["edje, as many as lance"] = [run(3.0)]
    targets = {target["name"]: target for target in judge("bf16", sections, "edje")}
    assert targets["cold random, relative to Lance"]["measured"] == 2
    assert "warm random, relative to memcpy" not in {target["name"] for target in judge("fp8", sections, "edje")}


def test_every_discarded_run_is_listed():
    entries = {"edje": {"runs": [run(1.0, 0), run(1.0, 1, discarded="not cold: 9.0% ...")]}}
    report = {"precisions": {"bf16": {"sections": {"cold random": {"entries": entries}}}}}
    assert discarded(report) == ["bf16, cold random, edje, repeat 2: not cold: 9.0% ..."]


@pytest.mark.parametrize("values", [(3.2, 7.9), (0.9, 1.4), (0.3, 5.0), (0.2, 80.0), (1000.0, 1001.0)])
def test_a_logarithmic_axis_always_has_numbers(values):
    from benchmarks.fetch.plots import _plain_log
    from edje_index.evaluation.plots import new_figure

    figure, axes = new_figure("title", "x", "y")
    axes.plot(values, (0, 1))
    _plain_log(axes)
    figure.canvas.draw()
    low, high = axes.get_xlim()
    labels = [tick.get_text() for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    assert len([label for label in labels if label]) >= 2
