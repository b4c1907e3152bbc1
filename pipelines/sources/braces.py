"""Brace expansion of shard names, as shells and WebDataset write it: `{0000..0127}.tar`, `{train,val}.tar`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from storage_formats.errors import UsageError

MAX_EXPANSIONS = 100_000
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")


def expand_braces(pattern: str) -> list[str]:
    """All names that a pattern stands for, in order; [pattern] where it holds no braces to expand.

    Groups may be nested. Ranges keep the width of a bound that begins with 0, and may run down. Raises UsageError
    for more than `MAX_EXPANSIONS` names.
    """
    names = list(itertools.islice(_expand(pattern), MAX_EXPANSIONS + 1))
    if len(names) > MAX_EXPANSIONS:
        raise UsageError(f"{pattern} stands for more than {MAX_EXPANSIONS} names; give it in parts")
    return names


def _expand(text: str) -> Iterator[str]:
    for start in (place for place, letter in enumerate(text) if letter == "{"):
        parts, end = _group(text, start)
        choices = _choices(parts)
        if choices is not None:
            for choice in choices:
                yield from (text[:start] + choice + rest for rest in _expand(text[end:]))
            return
    yield text


def _group(text: str, start: int) -> tuple[list[str], int]:
    """The parts between the commas of the group that opens at `start`, and its end; no parts where it is not closed."""
    parts, depth, begun = [], 0, start + 1
    for place in range(start, len(text)):
        letter = text[place]
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            parts.append(text[begun:place])
            begun = place + 1
        if depth == 0:
            return parts, begun
    return [], start


def _choices(parts: list[str]) -> Iterable[str] | None:
    """What a group may be replaced by; None where it is no list and no range, and stands for itself."""
    if len(parts) > 1:
        return itertools.chain.from_iterable(_expand(part) for part in parts)
    bounds = _RANGE.fullmatch(parts[0]) if parts else None
    if bounds is None:
        return None
    start, stop = int(bounds[1]), int(bounds[2])
    padded = any(re.match(r"-?0\d", bound) for bound in bounds.groups())
    width = max(map(len, bounds.groups())) if padded else 0
    step = 1 if stop >= start else -1
    return (f"{number:0{width}d}" for number in range(start, stop + step, step))
