"""Brace expansion of shard names, as shells and WebDataset write it: `{0000..0127}.tar`, `{train,val}.tar`."""

from __future__ import annotations

import re

from storage_formats.errors import UsageError

MAX_EXPANSIONS = 1_000_000
_INNERMOST = re.compile(r"\{([^{}]*,[^{}]*|-?\d+\.\.-?\d+)\}")


def expand_braces(pattern: str) -> list[str]:
    """All names that a pattern stands for, in order; [pattern] where it holds no braces to expand.

    Ranges keep the width of a bound that begins with 0, and may run down. Raises UsageError for more than
    `MAX_EXPANSIONS` names.
    """
    names = [pattern]
    while any(_INNERMOST.search(name) for name in names):
        names = [made for name in names for made in _expand_first(name, pattern)]
        if len(names) > MAX_EXPANSIONS:
            raise _too_many(pattern)
    return names


def _expand_first(name: str, pattern: str) -> list[str]:
    found = _INNERMOST.search(name)
    if found is None:
        return [name]
    return [name[: found.start()] + choice + name[found.end() :] for choice in _choices(found[1], pattern)]


def _choices(inside: str, pattern: str) -> list[str]:
    if "," in inside:
        return inside.split(",")
    first, last = inside.split("..")
    start, stop = int(first), int(last)
    if abs(stop - start) >= MAX_EXPANSIONS:
        raise _too_many(pattern)
    padded = any(re.match(r"-?0\d", bound) for bound in (first, last))
    width = max(len(first), len(last)) if padded else 0
    step = 1 if stop >= start else -1
    return [f"{number:0{width}d}" for number in range(start, stop + step, step)]


def _too_many(pattern: str) -> UsageError:
    return UsageError(f"{pattern} stands for more than {MAX_EXPANSIONS} names; give it in parts")
