"""Expands braces in shard names as shells and WebDataset do: `{0000..0127}.tar`, `{train,val}.tar`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from storage_formats.errors import UsageError

MAX_EXPANSIONS = 100_000
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")


def expand_braces(pattern: str) -> list[str]:
    """Return all names that `pattern` expands to, in order.

    Groups can be nested. A range can count down. If a bound of a range starts with 0, all numbers of the range are
    padded with zeros.

    Raises:
        UsageError: the pattern expands to more than `MAX_EXPANSIONS` names.
    """
    names = list(itertools.islice(_expand(pattern), MAX_EXPANSIONS + 1))
    if len(names) > MAX_EXPANSIONS:
        raise UsageError(
            f"{pattern} expands to more than {MAX_EXPANSIONS:,} names; give several smaller patterns",
            parameter="sources",
        )
    return names


def _expand(text: str) -> Iterator[str]:
    for start in (position for position, letter in enumerate(text) if letter == "{"):
        parts, end = _group(text, start)
        choices = _choices(parts)
        if choices is not None:
            for choice in choices:
                yield from (text[:start] + choice + rest for rest in _expand(text[end:]))
            return
    yield text


def _group(text: str, start: int) -> tuple[list[str], int]:
    """Return the parts of the group at `start`, and the position after the group. An unclosed group has no parts."""
    parts, depth, part_start = [], 0, start + 1
    for position in range(start, len(text)):
        letter = text[position]
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            parts.append(text[part_start:position])
            part_start = position + 1
        if depth == 0:
            return parts, part_start
    return [], start


def _choices(parts: list[str]) -> Iterable[str] | None:
    """Return the strings that a group expands to; None if the group is neither a list nor a range."""
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
