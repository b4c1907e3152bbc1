"""What objects print as."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any


def refuse_pickle(remedy: str) -> Callable[[object], Any]:
    """Return a method `__reduce__` for objects that cannot be sent to another process.
    `remedy` says what to do.
    """

    def reduce(sent: object) -> Any:
        raise TypeError(
            f"a {type(sent).__name__} cannot be sent to another process; {remedy}"
        )

    return reduce


def repr_of(*paths: str) -> Callable[[object], str]:
    """Return a method `__repr__` that shows the type of an object and its
    attributes, such as `info.path`.
    """
    readers = {path.rpartition(".")[2].strip("_"): attrgetter(path) for path in paths}

    def describe(shown: object) -> str:
        attributes = (f"{name}={read(shown)}" for name, read in readers.items())
        return f"{type(shown).__name__}({', '.join(attributes)})"

    return describe
