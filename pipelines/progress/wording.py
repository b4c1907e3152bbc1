"""Formats counts, sizes, durations and names for messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Format a count and a noun, in the plural if needed: "1 shard", "2,000 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(size: float) -> str:
    """Format a size in bytes with a decimal unit: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float) -> str:
    """Format a duration, given in seconds, with the two largest units: "3m13s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def printable(text: str) -> str:
    """Return `text` with every non-printable character escaped, so that no file name can control the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
