"""Finds inputs that make worker processes die or hang.

A worker writes a file in `build/attempts/` for each attempt at a shard, and removes the file at the end. If the process
dies, the file remains. The next attempt at the shard is then careful: the worker prepares one input at a time, and
writes the position of the current input to the file. After two careful attempts died at the same input, the row of this
input gets the status "failed". The file also names the machine of the attempt: if this machine is lost, the attempt
counts against no input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from storage_formats.atomic import naming
from storage_formats.format.layout import Layout

DEATHS = 2
"""After this number of careful attempts died at an input, the row of the input gets the status "failed"."""

_Result = TypeVar("_Result")


@dataclass
class Attempt:
    """One attempt at a shard.

    Attributes:
        path: file of the attempt.
        machine: id of the machine of the attempt; empty if the machine cannot be lost without the job.
        careful: True to prepare one input at a time, because the process of an earlier attempt died.
        deaths: number of careful attempts that died at an input, by position of the input.
    """

    path: Path
    machine: str
    careful: bool
    deaths: Counter[int] = field(default_factory=Counter)

    def ended_workers(self, position: int) -> bool:
        """Return True if `DEATHS` careful attempts died at the input at `position`."""
        return self.deaths[position] >= DEATHS

    @contextmanager
    def preparing(self, position: int) -> Iterator[None]:
        """In a careful attempt, record `position` as the current input during the `with` block."""
        if not self.careful:
            yield
            return
        self._write(position)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, position: int | None) -> None:
        deaths = {str(key): count for key, count in self.deaths.items()}
        content = {"machine": self.machine, "careful": self.careful, "position": position, "deaths": deaths}
        with naming(self.path):
            self.path.write_text(json.dumps(content))


@contextmanager
def begin_attempt(layout: Layout, shard: int, machine: str = "", alive: Collection[str] = ()) -> Iterator[Attempt]:
    """Create the file of an attempt, yield the attempt to the `with` block, and remove the file after the block.

    Args:
        layout: paths of the index.
        shard: shard number.
        machine: see `Attempt`.
        alive: ids of the machines that are not lost.
    """
    # The file stays if the process dies, or if an exception ends the attempt and earlier deaths are recorded.
    path = layout.attempt(shard)
    attempt = Attempt(path, machine, careful=True)
    try:
        content = json.loads(path.read_text())
        attempt.deaths.update({int(position): int(count) for position, count in content["deaths"].items()})
        if content.get("machine") and content["machine"] not in alive:
            attempt.careful = bool(content["careful"])
        elif content["position"] is not None:
            attempt.deaths[int(content["position"])] += 1
    except FileNotFoundError:
        attempt.careful = False
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # the process died while it wrote
        attempt.deaths.clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt._write(None)
    try:
        yield attempt
    except BaseException:
        if not attempt.deaths:
            path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)


class OneAtATime(Executor):
    """Executor that runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
