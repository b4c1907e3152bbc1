"""Tasks in processes of their own, their summary and their report."""

import os

import pytest

from benchmarks import harness
from benchmarks.harness import Task, faster, run, summaries
from storage_formats.errors import UsageError

ABOUT = {
    "name": "demo",
    "title": "Demo",
    "settings": {},
    "subjects": {"ours": ("1", "as it is"), "peer": ("2", "fastest")},
    "reference": "ours",
    "notes": [],
    "method": "- Nothing special.",
}


def work(rate, *, fails=False):
    """A workload: runs in a process of its own."""
    print("text of a library")
    yield {"case": "cold", "values": {"blocks/s": rate, "process": os.getpid()}}
    if fails:
        raise ValueError("the disk is gone")
    yield {"case": "warm", "problem": "not warm"}


def fail(rate):
    yield from work(rate, fails=True)


def wait(seconds):
    import time

    time.sleep(seconds)
    yield {}


def task(subject, rate, function="work", repeat=0):
    name = f"{__name__}:{function}"
    return Task("bf16", "random", subject, name, [rate], repeat)


def test_each_result_is_printed_and_saved_and_a_failed_run_fails_alone(tmp_path):
    tasks = [task("ours", 100), task("peer", 200, "fail")]
    said = []

    def say(line):
        if ", warm: " in line:
            saved.append([*(tmp_path / "out").glob("*-demo.json")])
        said.append(line)

    saved = []
    report = run(
        ABOUT,
        tasks,
        tmp_path,
        tmp_path / "scratch",
        say,
        report_folder=tmp_path / "out",
    )
    # the cold result was saved before the warm one was there
    assert saved[0]
    begin = "1/2, 0 min left: bf16, random, ours, cold: "
    assert any(line.startswith(begin) for line in said)
    rows = {(row["subject"], row["case"]): row for row in report["rows"]}
    values = rows["ours", "cold"]["values"]
    assert values["blocks/s"] == 100
    assert values["process"] != os.getpid()
    assert rows["ours", "warm"]["problems"] == ["not warm"]
    assert rows["peer", "cold"]["ratio"] == 0.5
    assert "the disk is gone" in rows["peer", "failed"]["problems"][0]
    assert rows["peer", "failed"]["problems"][0].startswith(harness.FAILURES)
    text = next((tmp_path / "out").glob("*-demo.md")).read_text()
    assert "| peer, 2 | **200 (0.50)** |" in text
    assert text.count("not warm") == 1
    assert not (tmp_path / "scratch").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    (failed,) = harness.results_of(f"{__name__}:wait", [60], tmp_path, 0.5)
    assert failed["case"] == "failed"
    assert "124" in failed["problem"]


def length(text):
    yield {"case": len(text)}


def test_arguments_may_be_longer_than_a_command(tmp_path):
    text = "x" * (200 << 10)
    assert list(harness.results_of(f"{__name__}:length", [text], tmp_path)) == [
        {"case": len(text)}
    ]


def test_an_interrupted_benchmark_continues(tmp_path):
    def stop(line):
        if line.startswith("2/2"):
            raise KeyboardInterrupt

    tasks = [task("ours", 100), task("peer", 50)]
    paths = (tmp_path, tmp_path / "scratch")
    with pytest.raises(KeyboardInterrupt):
        run(ABOUT, tasks, *paths, stop)
    said = []
    report = run(ABOUT, tasks, *paths, said.append)
    assert not any(line.startswith("1/2") for line in said)
    assert "1 runs were measured before an interruption" in said
    assert [row["ratio"] for row in report["rows"] if row["values"]] == [1, 2]


def test_what_the_end_needs_is_checked_at_the_start(tmp_path, monkeypatch):
    """A folder that cannot be written ends the benchmark before its first run, and a
    report needs no matplotlib.
    """
    paths = (tmp_path, tmp_path / "scratch")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write the report"):
        run(ABOUT, [], *paths, print, report_folder=tmp_path / "file")
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    said = []
    run(ABOUT, [task("ours", 1)], *paths, said.append, report_folder=tmp_path / "out")
    assert said[0] == "the report has no picture: matplotlib is not installed"
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [
        ".json",
        ".md",
    ]


def result(subject, rate, repeat, case="cold"):
    given = task(subject, rate, repeat=repeat)._asdict()
    given |= {"case": case, "command": "python"}
    if rate is None:
        return given | {"problem": "not cold"}
    return given | {"values": {"GB/s": rate, "p50 ms": 1 / rate}}


def test_a_row_has_the_median_and_the_ratio_to_runs_of_the_same_turn():
    rates = {"ours": (100, 300, 200), "peer": (50, 100, None), "the device": (1000,)}
    results = [
        result(subject, rate, repeat)
        for subject, of_subject in rates.items()
        for repeat, rate in enumerate(of_subject)
    ]
    rows = summaries(results, "ours")
    ours, peer, device = rows
    assert (len(ours["runs"]), ours["values"]["GB/s"], ours["ratio"]) == (3, 200, 1)
    assert ours["range"] == [100, 300]
    assert (peer["values"]["GB/s"], peer["ratio"]) == (75, 2.5)
    assert peer["problems"] == ["not cold"]
    assert device["ratio"] == 0.1
    # the device is no library
    assert [*faster(rows, "ours")] == []
