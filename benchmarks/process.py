"""Calls functions in new processes, so that no measurement depends on what earlier
measurements imported or cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from benchmarks.report import Report
from storage_formats.errors import EdjeError


def call_in_process(
    function: str, *arguments: Any, timeout: float | None = None
) -> Any:
    """Call a function in a new process, and return its result.

    Args:
        function: module and name, for example "benchmarks.fetch.bench:measure".
        *arguments: arguments of the function. They and the result must be JSON values.
        timeout: seconds after which the process is killed; None for no limit.

    Raises:
        EdjeError: the function raised an error, or the process died or took too long.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.process",
        function,
        json.dumps(arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EdjeError(f"took more than {timeout:.0f} s") from None
    if done.returncode:
        last_line = (done.stderr.strip() or "no message").splitlines()[-1]
        raise EdjeError(f"ended with code {done.returncode}: {last_line}")
    return json.loads(done.stdout)


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


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    # Libraries may print to standard output, where only the result may appear. Their
    # output goes to standard error.
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    json.dump(getattr(import_module(module), name)(*json.loads(sys.argv[2])), answers)
    answers.flush()
