"""Formats counts, sizes, durations and names for messages, and parses sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:([KMGT])(i)?)?B?", re.IGNORECASE)


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


def parse_bytes(text: str) -> int:
    """Parse a size in bytes. The units K, M, G and T are decimal, and Ki, Mi, Gi and Ti
    are binary. A B may follow.

    Examples:
        >>> from pipelines.progress.wording import parse_bytes
        >>> parse_bytes("1.5G"), parse_bytes("500 MB"), parse_bytes("4GiB")
        (1500000000, 500000000, 4294967296)
    """
    match = _SIZE.fullmatch(text)
    if match is None or not text.isascii():
        raise ValueError(
            f"{text!r} is not a size; give a number of bytes with a unit, for example"
            " 500M, 8G or 4GiB"
        )
    number, unit, binary = match.groups()
    power = 0 if unit is None else "KMGT".index(unit.upper()) + 1
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def duration(seconds: float) -> str:
    """Format a duration, given in seconds, with the two largest units: "3m13s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


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


def busy_text(shares: Mapping[str, float]) -> str:
    """Return for example "helpers 93 % busy, model 40 % busy"."""
    return ", ".join(f"{name} {share:.0%} busy" for name, share in shares.items())
