"""Runs the steps of a benchmark in processes of their own, which tells the time and the peak memory of each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_step(module: str, step: str, *arguments: object) -> dict[str, Any]:
    """Run `step` of `module`, which must call `answer_step` when it is run, and return its result.

    The result also holds `seconds`, `cpu_seconds`, and the peak resident memory in bytes before the step
    (`libraries_bytes`) and after it (`peak_bytes`).
    """
    command = [sys.executable, "-m", module, step, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def answer_step(steps: Mapping[str, Callable[..., dict[str, Any]]], prepare: Callable[[], None]) -> None:
    """Run the step that the command line names, and print its result as JSON. `prepare` loads libraries."""
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
    """Return the peak resident memory of this process. Unlike `getrusage`, it does not count the parent before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
