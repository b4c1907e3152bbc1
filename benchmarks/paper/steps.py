"""Runs `edje-index` commands and stores their reports. An interrupted study continues after the last finished step."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import EdjeError

OUT = "{out}"
"""In the arguments of a command, this text is replaced by the folder of the step."""


@dataclass(frozen=True)
class Step:
    """A finished step.

    Attributes:
        folder: folder with the files that the step wrote.
        report: JSON object that the step printed or returned.
    """

    folder: Path
    report: dict[str, Any]


@dataclass
class Steps:
    """Runs the steps of studies and stores their reports. Studies with the same folder share their steps.

    Attributes:
        folder: folder that contains one folder per step.
        say: function that receives one line of text per step.
        listing: True to print the commands instead of running them.
    """

    folder: Path
    say: Callable[[str], None]
    listing: bool = False
    _listed: set[str] = field(default_factory=set)

    def command(self, name: str, *arguments: object) -> Step:
        """Run `edje-index ARGUMENTS --json`. Return the stored report if an earlier run had the same arguments.

        Args:
            name: start of the name of the step's folder.
            *arguments: arguments of the command. In each argument, `OUT` is replaced by the folder of the step.

        Raises:
            EdjeError: the command failed.
        """
        template = [str(argument) for argument in arguments]
        folder = self._folder(name, template)
        command = [argument.replace(OUT, str(folder)) for argument in template]

        def work() -> dict[str, Any]:
            return _report_of(command)

        return self._once(folder, shlex.join(["edje-index", *command]), work)

    def measure(self, name: str, settings: Sequence[object], work: Callable[[], dict[str, Any]]) -> Step:
        """Return the result of `work()`. Return the stored result if an earlier call had the same name and settings."""
        words = [str(value) for value in settings]
        return self._once(self._folder(name, words), f"measure {name} of {' '.join(words)}", work)

    def _folder(self, name: str, template: Sequence[str]) -> Path:
        """Return the folder of a step. The name of the folder does not depend on `self.folder`."""
        portable = [argument.replace(str(self.folder), "{steps}") for argument in template]
        digest = hashlib.sha256(json.dumps([name, portable]).encode()).hexdigest()
        return self.folder / f"{name}-{digest[:12]}"

    def _once(self, folder: Path, line: str, work: Callable[[], dict[str, Any]]) -> Step:
        stored = folder / "report.json"
        if stored.exists():
            return Step(folder, json.loads(stored.read_bytes()))
        if self.listing:
            if line not in self._listed:
                self._listed.add(line)
                self.say(line)
            return Step(folder, {})
        self.say(line)
        folder.mkdir(parents=True, exist_ok=True)
        report = work()
        write_bytes_atomic(stored, json.dumps(report, indent=1, default=str).encode())
        return Step(folder, report)


def _report_of(command: Sequence[str]) -> dict[str, Any]:
    """Run `edje-index` in a new process. Progress and errors of the command are printed to standard error."""
    arguments = [sys.executable, "-m", "pipelines.cli", *command, "--json"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EdjeError(
            f"edje-index {command[0]} ended with exit code {done.returncode}: fix the cause in the output above and "
            f"run the study again, which keeps finished steps; the command was: {shlex.join(['edje-index', *command])}"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report
