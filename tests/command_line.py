"""Runs `edje-index` as a user does: in a process of its own, or in this one, which
has all libraries loaded.
"""

import contextlib
import io
import json
import subprocess
import sys
from typing import Any

import torch

from pipelines.cli import main
from tests.conftest import environment


def command(*arguments):
    """The command line of `edje-index ARGUMENTS`."""
    return [sys.executable, "-m", "pipelines.cli", *map(str, arguments)]


def run_process(*arguments, expect=0):
    """Run `edje-index ARGUMENTS --json` in a new process and return its object;
    fails on another exit code.
    """
    done = subprocess.run(
        command(*arguments, "--json"),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=300,
    )
    assert done.returncode == expect, (
        f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    assert "Traceback" not in done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def run_here(*arguments, expect=0):
    """`run_process` without the new process: faster, and torch keeps its number of
    threads.
    """
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*map(str, arguments), "--json"])
    torch.set_num_threads(threads)
    assert code == expect, out.getvalue()
    value: dict[str, Any] = json.loads(out.getvalue())
    return value
