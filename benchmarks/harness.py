"""Runs workloads in processes of their own, and makes a report of their results.

A benchmark is a list of tasks. A task calls a generator function in a new process, so
that no measurement depends on what an earlier one imported, cached or broke. The
subjects of a table take turns, so that a change of the machine's speed affects all of
them. Each result is printed and saved as soon as it is measured. It is a JSON object:

    case      what was measured, for example "cold" or "batch 64"
    values    numbers by column title; the first is a rate, and more is better
    problem   reason why the result does not count; missing if it counts
    command   shell command that repeats the run; by default, that of the task

A report is Markdown, a picture, and JSON:

    name, title    name of the command and heading
    command        command line that repeats the benchmark, without directories
    settings       further values that determine the results
    environment    hardware, versions, disk, and load before the first run
    subjects       [version, setting] by subject
    reference      subject that all others of a table are compared with
    verdict        first sentences
    notes          warnings and remarks
    method         how the measurements are made and what the columns mean
    rows           results, see `summaries` and `compared`
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.disk import describe_disk
from edje_index.evaluation.report import check_report_folder, table, write_report
from pipelines.environment import environment

Report: TypeAlias = dict[str, Any]
"""A report, or a part of it, as a JSON object."""

# A row is called faster than the reference if the rate of the reference is less than
# this fraction of its rate.
_FASTER = 0.95
# number of panels per line of the picture
_PANELS = 3
DEVICE = "the device"
READER = "edje-index"
RECORDS = "edje-index records"
"""Names of the subjects that are no libraries, and are never called faster: the disk
itself, and this project's reader with and without decoding.
"""
Say: TypeAlias = Callable[[str], None]
"""Receives one line of text after each measurement."""

FAILURES = ("failed", "WRONG")
"""Beginnings of problems for which a benchmark fails: of a run that ended with an
error, and of a wrong result.
"""

# time limit for a task, including its warm-up and the copy of the records for a peer
_TIMEOUT_SECONDS = 1800.0
_KEYS = ("group", "table", "case", "subject")


class Task(NamedTuple):
    """One run: what a process measures.

    Attributes:
        group, table: headings of the results. The subjects of a table are compared.
        function: generator function that yields results, as "module:name".
        arguments: arguments of the function, which are JSON values.
    """

    group: str
    table: str
    subject: str
    function: str
    arguments: Sequence[Any]
    repeat: int = 0

    @property
    def command(self) -> str:
        """The command that repeats this run in the folder of the benchmark."""
        arguments = shlex.quote(json.dumps(self.arguments))
        return f"printf %s {arguments} | python -m benchmarks.harness {self.function}"


def run(
    about: Report,
    tasks: Sequence[Task],
    folder: Path,
    scratch: Path,
    say: Say,
    *,
    verdict: Callable[[list[Report]], Iterable[str]] = lambda rows: (),
    report_folder: Path | None = None,
) -> Report:
    """Run a benchmark, and return its report.

    Args:
        about: the members of the report that are known before the measurements.
        folder: working directory of the runs.
        scratch: directory for files of the runs, which is removed at the end. If a
            benchmark is interrupted, the next one with equal `tasks` and settings
            continues there.
        say: receives each note and each result.
        verdict: returns the first sentences of the report from its rows.
        report_folder: directory to which the report is written after each result.

    Raises:
        UsageError: no report can be written to `report_folder`.
    """
    draws = find_spec("matplotlib") is not None
    if report_folder is not None:
        check_report_folder(report_folder)
        if not draws:
            say("the report has no picture: matplotlib is not installed")
    for note in about["notes"]:
        say(note)
    say(f"{len(tasks)} runs")
    log = scratch / "results.jsonl"
    # Results of an interrupted benchmark are used only if it measured the same.
    key = json.dumps([about["settings"], about["subjects"], tasks])
    lines = log.read_text().splitlines() if log.exists() else []
    if lines[:1] != [key]:
        lines = [key]
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        log.write_text(key + "\n")
    results = [result for line in lines[1:] for result in json.loads(line)]
    words = [Path(word).name for word in sys.argv[1:]]
    report = {
        **about,
        "command": shlex.join(["edje-index", *words]),
        "environment": {
            **environment(),
            "disk": describe_disk(scratch),
            "load": f"{os.getloadavg()[0]:.1f} before the first run",
        },
        "rows": [],
        "verdict": [],
    }
    if results:
        say(f"{len(lines) - 1} runs were measured before an interruption")
    started = time.monotonic()
    for number, task in enumerate(tasks[len(lines) - 1 :], len(lines)):
        before = len(results)
        for result in results_of(task.function, task.arguments, folder):
            results.append(task._asdict() | {"command": task.command} | result)
            text = result.get("problem") or ", ".join(
                f"{name} {value:,.4g}" for name, value in result["values"].items()
            )
            names = ", ".join([*task[:3], result["case"]])
            run_seconds = (time.monotonic() - started) / (number - len(lines) + 1)
            minutes = run_seconds * (len(tasks) - number) / 60
            say(f"{number}/{len(tasks)}, {minutes:.0f} min left: {names}: {text}")
            rows = summaries(results, about["reference"])
            sentences = verdict(rows)
            report |= {"rows": rows, "verdict": list(sentences)}
            if report_folder is not None:
                write(report, report_folder)
        # The file is closed after each line, so that a killed process loses no run.
        with log.open("a") as file:
            file.write(json.dumps(results[before:]) + "\n")
    shutil.rmtree(scratch)
    if report_folder is not None:
        write(report, report_folder, draws=draws)
    return report


def results_of(
    function: str,
    arguments: Sequence[Any],
    folder: Path,
    seconds: float = _TIMEOUT_SECONDS,
) -> Iterator[Report]:
    """Call a generator function in a new process with the working directory `folder`,
    and yield what it yields.

    If the function raises an error, or if the process dies or takes more than
    `seconds`, the last result says so.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-P", "-m", "benchmarks.harness", function]
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as errors:
        # the system limits the length of a command
        json.dump(arguments, given)
        given.seek(0)
        process = subprocess.Popen(
            ["timeout", str(seconds), *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
        except BaseException:
            # The program `timeout` passes the signal on.
            process.terminate()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        last = (errors.read().strip() or "it took too long").splitlines()[-1]
        if code:
            yield {"case": "failed", "problem": f"failed with code {code}: {last}"}


def summaries(results: Sequence[Report], reference: str) -> list[Report]:
    """Return one row for each group, table, case and subject.

    `runs` has the values of each repeat that counts, `values` their medians, and
    `range` the lowest and the highest rate. `compared` describes `ratio`.
    """
    rows = dict[tuple[str, ...], Report]()
    for result in results:
        row = {name: result[name] for name in (*_KEYS, "command")}
        row = rows.setdefault(
            tuple(result[name] for name in _KEYS),
            row | {"runs": {}, "problems": []},
        )
        if "problem" in result:
            row["problems"].append(result["problem"])
        else:
            row["runs"][result["repeat"]] = result["values"]
    for row in rows.values():
        runs = list(row["runs"].values())
        rates = [_rate(values) for values in runs]
        row["values"] = {
            name: statistics.median(values[name] for values in runs)
            for name in (runs[0] if runs else {})
        }
        row["range"] = [min(rates), max(rates)] if rates else None
    return compared([*rows.values()], reference)


def compared(rows: Sequence[Report], reference: str) -> list[Report]:
    """Return rows with their `ratio`: the rate of the subject `reference` divided by
    the rate of the row. It is computed in each repeat in which both count. The ratio is
    the median over these repeats, or None if there is no such repeat.
    """
    runs = {_case(row): row["runs"] for row in select(rows, subject=reference)}
    result = []
    for row in rows:
        of_reference = runs.get(_case(row), {})
        ratios = [
            _rate(of_reference[repeat]) / _rate(values)
            for repeat, values in row["runs"].items()
            if repeat in of_reference
        ]
        result.append(row | {"ratio": statistics.median(ratios) if ratios else None})
    return result


def _case(row: Report) -> tuple[str, str, str]:
    """Return what the row has in common with the rows that it is compared with."""
    return row["group"], row["table"], row["case"]


def median_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """Return the median duration of `runs` calls of `work`. Two calls before them are
    the warm-up, which compiles kernels.
    """
    seconds = []
    for _ in range(2 + runs):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def _rate(values: dict[str, float]) -> float:
    return next(iter(values.values()))


def write(report: Report, folder: Path, *, draws: bool = False) -> None:
    """Write the report to the directory `folder`. The names of the files begin with the
    date and the name of the benchmark. A picture is drawn only if `draws` is True.
    """
    name = f"{report['environment']['date']}-{report['name']}"
    picture = f"{name}.png" if draws else None
    if picture:
        draw(report["rows"], folder / picture)
    text = "\n".join(report_lines(report, picture))
    write_report(folder, text + "\n", report, name)


def report_lines(report: Report, picture_name: str | None = None) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    where = report["environment"]
    rows = report["rows"]
    yield f"# {report['title']}, {where['date']}\n"
    yield from (f"- {line}" for line in report["verdict"])
    yield ""
    if picture_name:
        yield f"![Rates]({picture_name})\n"
    rated = [row for row in rows if row["ratio"] is not None]
    groups = dict.fromkeys(row["group"] for row in rated)
    if len(groups) > 1:
        _, title, case = _case(rated[0])
        first = select(rated, table=title, case=case)
        yield from _crosstab(report, f"{title}, {case}", first, ["group"])
    for group in groups:
        of_group = select(rated, group=group)
        yield from _crosstab(report, f"All of {group}", of_group, ["table", "case"])
    versions = ", ".join(f"{name} {each}" for name, each in where["versions"].items())
    yield (
        f"## Machine\n\n{where['cores']} cores of {where['processor']},"
        f" {where['memory_gib']} GiB, Linux {where['kernel']}, Python"
        f" {where['python']}, {versions}."
    )
    yield f"\nDisk: {where['disk']}.\n\nLoad: {where['load']}."
    yield f"\nThis command repeats the benchmark:\n\n    {report['command']}"
    for group, name in dict.fromkeys((row["group"], row["table"]) for row in rows):
        of_table = select(rows, group=group, table=name)
        columns = dict.fromkeys(name for row in of_table for name in row["values"])
        yield f"\n## {group}: {name}\n"
        lines = []
        for row in of_table:
            cells = {name: number_text(value) for name, value in row["values"].items()}
            for first in [*cells][:1]:
                cells[first] += " ({} - {})".format(*map(number_text, row["range"]))
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            numbers = [cells.get(column, "") for column in columns]
            lines.append([row["subject"], row["case"], ratio, *numbers])
        yield from table(("", "case", f"{report['reference']} / row", *columns), lines)
        yield "\n```sh"
        yield from dict.fromkeys(row["command"] for row in of_table)
        yield "```"
    yield "\n## Settings, notes and discarded runs\n"
    for subject, (version, setting) in report["subjects"].items():
        yield f"- {subject}, {version}: {setting}."
    yield from (f"- {line}" for line in report["notes"])
    for row in rows:
        names = ", ".join(row[key] for key in ("group", "table", "subject", "case"))
        yield from (f"- {names}: {problem}" for problem in row["problems"])
    yield (
        "\n## Method\n\nEvery run is a process of its own, and the subjects of a table"
        " take turns. Values are medians over the runs that count. The first value is"
        " a rate; in brackets, its range. Runs with a problem are listed above and do"
        f" not count.\n\n{report['method']}"
    )


def faster(report_rows: Sequence[Report], reference: str) -> Iterator[str]:
    """Yield one sentence for each case in which a subject is faster than `reference`,
    with its factor in every group.
    """
    cases = dict[str, list[str]]()
    for row in report_rows:
        if _is_faster(row):
            case = f"{row['subject']}, {row['case']}, {row['table']}"
            text = f"{1 / row['ratio']:.1f} ({row['group']})"
            cases.setdefault(case, []).append(text)
    for case, factors in cases.items():
        yield f"Faster than {reference}: {case}, by {', '.join(factors)}."


def select(rows: Sequence[Report], **values: object) -> list[Report]:
    """Return the rows whose members equal `values`."""
    return [row for row in rows if all(row[key] == values[key] for key in values)]


def draw(rows: Sequence[Report], path: Path) -> None:
    """Draw a picture with one panel for each table and case that compares several
    subjects. A bar shows the rate of a subject.
    """
    from matplotlib.figure import Figure

    panels = dict[str, list[Report]]()
    for row in rows:
        for unit in [*row["values"]][:1]:
            title = f"{row['group']}: {row['table']}\n{row['case']}, {unit}"
            panels.setdefault(title, []).append(row)
    panels = {
        title: of_panel for title, of_panel in panels.items() if len(of_panel) > 1
    }
    lines = -(-len(panels) // _PANELS) or 1
    figure = Figure(figsize=(15, 3 * lines), layout="constrained")
    for number, (title, of_panel) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, _PANELS, number)
        rates = [_rate(row["values"]) for row in of_panel]
        bars = axis.barh([row["subject"] for row in of_panel], rates)
        axis.bar_label(bars, [*map(number_text, rates)], padding=3)
        axis.set_title(title, fontsize="medium")
        axis.invert_yaxis()
        axis.margins(x=0.2)
    figure.savefig(path, dpi=110)


def number_text(value: float) -> str:
    """Return a number with three digits, or without decimal places."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _crosstab(
    report: Report, title: str, rows: Sequence[Report], keys: Sequence[str]
) -> Iterator[str]:
    """Yield a table of rates with one line per subject. The members `keys` of a row
    name its column.
    """
    cells = dict[str, dict[str, str]]()
    for row in rows:
        text = f"{number_text(_rate(row['values']))} ({row['ratio']:.2f})"
        name = f"{row['subject']}, {report['subjects'][row['subject']][0]}"
        column = ", ".join(row[key] for key in keys)
        cells.setdefault(name, {})[column] = f"**{text}**" if _is_faster(row) else text
    columns = dict.fromkeys(", ".join(row[key] for key in keys) for row in rows)
    unit = next(iter(rows[0]["values"]))
    yield f"## {title}, {unit} ({report['reference']} / row)\n"
    lines = (
        [name, *(of_subject.get(column, "") for column in columns)]
        for name, of_subject in cells.items()
    )
    yield from table(("", *columns), lines)
    yield ""


def _is_faster(row: Report) -> bool:
    is_library = row["subject"] not in (DEVICE, READER, RECORDS)
    return is_library and (row["ratio"] or 1) < _FASTER


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    # Libraries may print to standard output, where only results may appear. Their
    # output goes to standard error at once, so that an error comes last.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    module, _, name = sys.argv[1].partition(":")
    for each in getattr(import_module(module), name)(*json.load(sys.stdin)):
        print(json.dumps(each), file=answers, flush=True)
