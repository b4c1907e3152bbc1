"""Formats counts, sizes, durations and names for messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

# number of items of a list that are shown
_SHOWN = 20


def counted(count: int, noun: str) -> str:
    """Format a count and a noun, in the plural if needed: "1 shard", "2,000 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def by_reason(counts: Mapping[str, int]) -> str:
    """Format counts by reason, sorted: "missing 3, unreadable 1"."""
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))


def human_bytes(size: float) -> str:
    """Format a size in bytes with a decimal unit: "1.5 MB"."""
    from rich.filesize import decimal

    return decimal(int(size))


def duration(seconds: float) -> str:
    """Format a duration, given in seconds: "0:03:13"."""
    return str(timedelta(seconds=round(seconds)))


# zero-width joiners and marks of direction: they belong to the spelling of words, for
# example in Persian and Hebrew, and of emoji, and cannot control the terminal
_SPELLING = "\u061c\u200c\u200d\u200e\u200f"


def printable(text: str) -> str:
    """Return `text` with every non-printable character escaped, so that no file
    name can control the terminal. Zero-width joiners and marks of direction stay.
    """
    return "".join(
        letter if letter.isprintable() or letter in _SPELLING else repr(letter)[1:-1]
        for letter in text
    )


# What becomes of an input, as members of a `BuildResult`
_OUTCOMES = ("indexed", "duplicates", "failed", "unchanged", "stay_deleted")


def describe(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the members of `value` as aligned lines. Members that are 0, False or empty
    are left out. A list of objects or sentences has a line for each item. The numbers
    of inputs by outcome are one sum.
    """
    width = max(map(len, value))
    if "indexed" in value:
        terms = [
            f"{value[name]:,} {name.replace('_', ' ')}"
            for name in _OUTCOMES
            if value[name] or name in _OUTCOMES[:3]
        ]
        total = f"{counted(value['inputs'], 'input')} = {' + '.join(terms)}"
        if value.get("dry_run"):
            # Only the encoding shows which of these inputs are damaged.
            total = total.replace("indexed", "to index")
        value = {name: value[name] for name in value if name not in _OUTCOMES}
        value["inputs"] = total
    for name, member in value.items():
        label = name.replace("_", " ")
        is_long = isinstance(member, list | tuple) and any(
            isinstance(each, dict) or " " in str(each) for each in member
        )
        for each in member if is_long else [member]:
            if each:
                yield f"{label:<{width}}  {as_text(each, name)}"
                label = ""


def as_text(value: Any, name: str = "") -> str:
    """Return the text of a JSON value. `name` is that of its member, which says whether
    a number is one of bytes.
    """
    if isinstance(value, dict):
        return ", ".join(
            f"{key.replace('_', ' ')} ({as_text(each, f'{name} {key}')})"
            if isinstance(each, dict)
            else f"{key.replace('_', ' ')} {as_text(each, f'{name} {key}')}"
            for key, each in value.items()
            if each or each == 0
        )
    if isinstance(value, list | tuple):
        # Integers of a list are ids or sizes, and not counts.
        shown = [
            str(each) if isinstance(each, int) else as_text(each, name)
            for each in value[:_SHOWN]
        ]
        more = [f"{len(value) - _SHOWN:,} more"] * (len(value) > _SHOWN)
        return ", ".join(shown + more)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return (
            human_bytes(value) if re.search(r"\bbytes|_bytes", name) else f"{value:,}"
        )
    if "busy" in name:
        return f"{value:.0%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
