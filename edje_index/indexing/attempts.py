"""Finds the input at which a worker process dies or hangs.

Every attempt at a shard has a file in `build/attempts/`, which stays only if the process dies. The next attempt is
careful: it prepares one input at a time, and writes the position of the input into the file. An input at which two
careful attempts died becomes a failed row.
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
        path: file of the attempt.
        careful: True if an earlier attempt died.
        deaths: number of careful attempts that died, by the position of the input that was being prepared.
    """

    path: Path
    careful: bool
    deaths: Counter[int] = field(default_factory=Counter)

    def ended_workers(self, position: int) -> bool:
        """Return True if `DEATHS` careful attempts died at the input at `position`."""
        return self.deaths[position] >= DEATHS

    @contextmanager
    def preparing(self, position: int) -> Iterator[None]:
        """In a careful attempt, record during the block that the input at `position` is being prepared."""
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
    """Begin an attempt at `shard`, and remove the file of the attempt when it ends."""
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
    """Return the attempt that follows the one stored at `path`."""
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
    """Executor that runs each call when it is submitted."""

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
