"""Finds inputs that make worker processes die or hang.

A worker writes a file in `build/attempts/` for each attempt at a shard, and removes the file at the end. If the process
dies, the file remains. The next attempt at the shard is then careful: the worker prepares one input at a time, and
writes the position of the current input to the file. After two careful attempts died at the same input, the row of this
input gets the status "failed". If the whole machine is lost, `forget_attempt` removes what the file says against an
input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
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
        careful: True to prepare one input at a time, because the process of an earlier attempt died.
        deaths: number of careful attempts that died at an input, by position of the input.
    """

    path: Path
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
        content = {"careful": self.careful, "position": position, "deaths": deaths}
        with naming(self.path):
            self.path.write_text(json.dumps(content))


@contextmanager
def begin_attempt(layout: Layout, shard: int) -> Iterator[Attempt]:
    """Create the file of an attempt, yield the attempt to the `with` block, and remove the file after the block."""
    # The file stays if the process dies, or if an exception ends the attempt and earlier deaths are recorded.
    path = layout.attempt(shard)
    attempt = _attempt_after(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt._write(None)
    try:
        yield attempt
    except BaseException:
        if not attempt.deaths:
            path.unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)


def _attempt_after(path: Path) -> Attempt:
    """Return the attempt after the attempt that the file `path` records, or the first attempt if there is no file."""
    try:
        content = json.loads(path.read_text())
        deaths = Counter({int(position): int(count) for position, count in content["deaths"].items()})
        if content["position"] is not None:
            deaths[int(content["position"])] += 1
    except FileNotFoundError:
        return Attempt(path, careful=False)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # the process died while it wrote
        return Attempt(path, careful=True)
    return Attempt(path, careful=True, deaths=deaths)


def forget_attempt(layout: Layout, shard: int) -> None:
    """Forget that the last attempt at `shard` died, because its machine was lost. Earlier deaths still count."""
    path = layout.attempt(shard)
    try:
        content = json.loads(path.read_text())
        if not content["careful"]:
            path.unlink()
        elif content["position"] is not None:
            path.write_text(json.dumps({**content, "position": None}))
    except FileNotFoundError:
        return
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # counts against no input
        return


def forget_attempts(layout: Layout) -> None:
    """Call `forget_attempt` for each shard with an attempt that has not ended."""
    for path in layout.attempt(0).parent.glob("*.json"):
        if path.stem.isdecimal():
            forget_attempt(layout, int(path.stem))


class OneAtATime(Executor):
    """Executor that runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
