"""Runs workloads in processes of their own, and makes a report of their results.

A benchmark is a list of tasks. A task calls a generator function in a new process, so
that no measurement depends on what an earlier one imported, cached or broke. The
subjects of a table take turns, so that a change of the machine's speed affects all of
them. Each result is printed and saved as soon as it is measured. It is a JSON object:

    case      what was measured, for example "cold" or "batch 64"
    values    numbers by column title; the first is a rate, and more is better
    problem   reason why the result does not count; missing if it counts
    command   shell command that repeats the run; by default, that of the task
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.report import Report, write
from edje_index.evaluation.report import check_report_folder
from pipelines.environment import environment
from storage_formats.errors import EdjeError

Say: TypeAlias = Callable[[str], None]
"""Receives one line of text after each measurement."""

# time limit for a task, including its warm-up and the copy of the records for a peer
_TIMEOUT_SECONDS = 1800.0
_KEYS = ("group", "table", "case", "subject")


class Task(NamedTuple):
    """One run: what a process measures.

    Attributes:
        group, table: headings of the results. The subjects of a table are compared.
        function: generator function that yields results, as "module:name".
        arguments: arguments of the function, which are JSON values.
        seconds: expected duration.
    """

    group: str
    table: str
    subject: str
    function: str
    arguments: Sequence[Any]
    repeat: int = 0
    seconds: float = 1.0

    @property
    def command(self) -> str:
        """The command that repeats this run in the folder of the benchmark."""
        arguments = shlex.quote(json.dumps(self.arguments))
        return f"python -m benchmarks.harness {self.function} {arguments}"


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
        about: the members of the report that are known before the measurements, see
            `benchmarks.report`.
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
    if report_folder is not None:
        check_report_folder(report_folder)
        if find_spec("matplotlib") is None:
            say("the report has no picture: matplotlib is not installed")
    expected = sum(task.seconds for task in tasks)
    for note in about["notes"]:
        say(note)
    say(
        f"{len(tasks)} runs take about {max(1, round(expected / 60))} min; if you"
        " interrupt the command, run it again to continue"
    )
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
    where = {**environment(), **about.get("environment", {})}
    report = {**about, "environment": where, "rows": [], "verdict": []}
    if results:
        say(f"{len(lines) - 1} runs were measured before an interruption")
    for number, task in enumerate(tasks[len(lines) - 1 :], len(lines)):
        before = len(results)
        for result in results_of(task.function, task.arguments, folder):
            results.append(task._asdict() | {"command": task.command} | result)
            text = result.get("problem") or ", ".join(
                f"{name} {value:,.4g}" for name, value in result["values"].items()
            )
            names = ", ".join([*task[:3], result["case"]])
            say(f"{number}/{len(tasks)} {names}: {text}")
            rows = summaries(results, about["reference"])
            sentences = verdict([row for row in rows if row["values"]])
            report |= {"rows": rows, "verdict": list(sentences)}
            if report_folder is not None:
                write(report, report_folder)
        # The file is closed after each line, so that a killed process loses no run.
        with log.open("a") as file:
            file.write(json.dumps(results[before:]) + "\n")
    shutil.rmtree(scratch)
    if report_folder is not None:
        write(report, report_folder, draws=find_spec("matplotlib") is not None)
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
    limit = ["timeout", str(seconds)]
    command = [*limit, sys.executable, "-P", "-m", "benchmarks.harness", function]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(arguments)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
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
            yield {"case": "failed", "problem": f"ended with code {code}: {last}"}


def run_command(*arguments: object) -> Report:
    """Run `edje-index ARGUMENTS --json`, and return the object that it prints.

    Raises:
        EdjeError: the command failed.
    """
    words = [sys.executable, "-m", "pipelines.cli", *map(str, arguments), "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EdjeError(
            f"edje-index {arguments[0]} ended with exit code {done.returncode}"
        )
    report: Report = json.loads(done.stdout)
    return report


def summaries(results: Sequence[Report], reference: str) -> list[Report]:
    """Return one row for each group, table, case and subject.

    `values` has medians over the runs that count, and `range` the lowest and the
    highest rate. `ratio` is the rate of the subject `reference` divided by the rate of
    the row, computed in each repeat in which both count. The median over these repeats
    is returned, or None if there is no such repeat.
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
    for key, row in rows.items():
        runs = row["runs"]
        of_reference = rows.get((*key[:-1], reference), {"runs": {}})["runs"]
        rates = {repeat: _rate(values) for repeat, values in runs.items()}
        ratios = [
            _rate(of_reference[repeat]) / rate
            for repeat, rate in rates.items()
            if repeat in of_reference
        ]
        row["values"] = {
            name: statistics.median(values[name] for values in runs.values())
            for name in next(iter(runs.values()), {})
        }
        row["range"] = [min(rates.values()), max(rates.values())] if rates else None
        row["ratio"] = statistics.median(ratios) if ratios else None
    return list(rows.values())


def _rate(values: dict[str, float]) -> float:
    return next(iter(values.values()))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    # Libraries may print to standard output, where only results may appear. Their
    # output goes to standard error.
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    for each in getattr(import_module(module), name)(*json.loads(sys.argv[2])):
        print(json.dumps(each), file=answers, flush=True)
