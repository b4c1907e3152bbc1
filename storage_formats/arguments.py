"""Checks arguments of the public interface, and describes objects in messages.

A check raises UsageError for a wrong value. The message contains the name of the
argument and the value.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Real
from operator import attrgetter, index
from pathlib import Path
from typing import Any

from storage_formats.errors import UsageError


def as_count(value: Any, name: str, least: int = 1, most: float = math.inf) -> int:
    """Return `value` as an int. Raise UsageError unless `value` is an integer from
    `least` to `most`. Integers of NumPy are accepted, booleans are not.
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = index(value)
            if least <= number <= most:
                return number
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise UsageError(
        f"{name} must be an integer {limits}, got {shown(value)}", parameter=name
    )


def as_number(
    value: object, name: str, least: float = 0.0, most: float = math.inf
) -> float:
    """Return `value` as a float. Raise UsageError unless `value` is a number from
    `least` to `most`. Numbers of NumPy are accepted, booleans and NaN are not.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        if least <= number <= most:
            return number
    raise UsageError(
        f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}",
        parameter=name,
    )


def optional_count(value: object, name: str, most: float = math.inf) -> int | None:
    """Return None if `value` is None. Otherwise return `value` as an int, and raise
    UsageError unless it is an integer from 1 to `most`.
    """
    return None if value is None else as_count(value, name, most=most)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint with the one of `names` that is most similar to the unknown `name`.
    Return an empty string if none is similar.
    """
    # The likeness of two names depends on their order, so both orders are tried.
    names = [*names]
    similar = difflib.get_close_matches(name, names, 1, cutoff=0.7) or [
        other for other in names if difflib.get_close_matches(other, [name], cutoff=0.7)
    ]
    return f" (did you mean {similar[0]}?)" if similar else ""


def as_text(value: object, name: str) -> str:
    """Return the string `value` as a str, and not as a subclass of str.

    Raises:
        UsageError: `value` is not a string, or contains a lone surrogate, which cannot
            be written as UTF-8.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, got {shown(value)}", parameter=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        lone = value[error.start]
        raise UsageError(
            f"{name} contains the lone surrogate {lone!r}, which is not valid Unicode:"
            f" {shown(value)}; remove it",
            parameter=name,
        ) from None
    return str(value)


def as_list(values: object, name: str, what: str) -> list[Any]:
    """Return the items of `values`, a sequence, an array or an iterator.

    Args:
        values: the items. A string, bytes, a mapping or a set is refused, because a
            caller hardly means the characters of a string, the keys of a mapping, or
            the unordered items of a set.
        what: description of the items for the error message, for example "strings".
    """
    try:
        if not isinstance(values, str | bytes | Mapping | Set):
            return [*iter(values)]  # type: ignore[call-overload]
    except TypeError:
        # not iterable
        pass
    raise UsageError(
        f"{name} must be a sequence of {what}, got {shown(values)}", parameter=name
    )


def as_path(value: object, name: str) -> Path:
    """Return `value`, a string or a path object, as a Path.

    Raises:
        UsageError: `value` has another type, or contains a character that the file
            system does not allow in a path.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(
        os.fspath(value), str
    ):
        raise UsageError(f"{name} must be a path, got {shown(value)}", parameter=name)
    try:
        possible = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise UsageError(
            f"{name} cannot be a path, because a character is not allowed: {value!r}",
            parameter=name,
        )
    return Path(value)


def shown(value: object) -> str:
    """Return a short representation of `value` for an error message."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:
        # Python refuses to convert an integer of thousands of digits to a string
        return f"a value of type {type(value).__name__}"


def refuse_pickle(remedy: str) -> Callable[[object], Any]:
    """Return a method `__reduce__` that raises TypeError, for objects that cannot be
    sent to another process. `remedy` is the end of the message, which says what to do.
    """

    def reduce(sent: object) -> Any:
        raise TypeError(
            f"a {type(sent).__name__} cannot be sent to another process; {remedy}"
        )

    return reduce


def repr_of(*paths: str) -> Callable[[object], str]:
    """Return a method `__repr__` that shows the type of an object and some attributes.

    Args:
        paths: attributes to show, for example `info.path`, which is shown as `path=`.
    """
    readers = {path.rpartition(".")[2].strip("_"): attrgetter(path) for path in paths}

    def describe(shown: object) -> str:
        attributes = (f"{name}={read(shown)}" for name, read in readers.items())
        return f"{type(shown).__name__}({', '.join(attributes)})"

    return describe
