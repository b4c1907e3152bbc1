"""Runs each step of a benchmark in a new process, so that its duration and peak memory can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_step(module: str, step: str, *arguments: object) -> dict[str, Any]:
    """Run a step in a new process, and return its result.

    The result also contains `seconds`, `cpu_seconds`, and the peak resident memory in bytes: before the step
    (`libraries_bytes`) and after the step (`peak_bytes`).

    Args:
        module: name of a module that calls `answer_step` when the module is run.
        step: name of the step.
        *arguments: arguments of the step.
    """
    command = [sys.executable, "-m", module, step, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def answer_step(steps: Mapping[str, Callable[..., dict[str, Any]]], prepare: Callable[[], None]) -> None:
    """Run the step that is named on the command line, and print its result as JSON.

    Args:
        steps: functions of the steps, by name.
        prepare: function that imports libraries before the measurement starts.
    """
    _, step, *arguments = sys.argv
    prepare()
    before, started, cpu = _peak_bytes(), time.monotonic(), time.process_time()
    result = steps[step](*arguments)
    usage = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
        "libraries_bytes": before,
        "peak_bytes": _peak_bytes(),
    }
    print(json.dumps({**result, **usage}))


def _peak_bytes() -> int:
    """Return the peak resident memory of this process.

    `getrusage` would include the memory of the parent before exec.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
