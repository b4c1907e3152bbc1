"""Formats counts, sizes, durations and names for messages."""

from __future__ import annotations

from collections.abc import Mapping


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
