"""Finds the input at which the worker process that reads it dies or hangs. Engines kill a process that hangs.

Every attempt at a shard leaves a file in `build/attempts/` until it ends, with success or an exception. An attempt that
finds the file of an earlier one is careful: it prepares one input after another and writes down which, so that the
next attempt knows at which input this one died. An input at which two careful attempts died becomes a failed row.
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
"""An input becomes a failed row when it has ended this many careful attempts."""

_Result = TypeVar("_Result")


@dataclass
class Attempt:
    """One attempt at a shard.

    Attributes:
        careful: an earlier attempt died.
        deaths: careful attempts that died, by the position of the input that they were preparing.
    """

    path: Path
    careful: bool
    deaths: Counter[int] = field(default_factory=Counter)

    def ended_workers(self, position: int) -> bool:
        """Whether the input at `position` ended too many attempts."""
        return self.deaths[position] >= DEATHS

    @contextmanager
    def preparing(self, position: int) -> Iterator[None]:
        """Write down that the input at `position` is being prepared, in a careful attempt."""
        if not self.careful:
            yield
            return
        self._write(position)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, position: int | None) -> None:
        content = {"position": position, "deaths": {str(key): count for key, count in self.deaths.items()}}
        with naming(self.path):
            self.path.write_text(json.dumps(content))


@contextmanager
def begin_attempt(layout: Layout, shard: int) -> Iterator[Attempt]:
    """Begin an attempt at `shard`. If the process dies, the file of the attempt stays as it is."""
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
    """The attempt that follows the one whose file is at `path`; a first attempt if there is no file."""
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


class OneAtATime(Executor):
    """Runs a call when it is submitted, so that nothing else runs meanwhile."""

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
