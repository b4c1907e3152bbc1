"""Texts to compare rankings with: from a file, or everyday captions that fit most collections of photos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edje_index.filesystem import read_json_lines
from storage_formats.errors import UsageError

_MEMBERS = ("query", "text", "caption", "captions")

GENERIC_CAPTIONS = (
    "a dog runs across a field of grass",
    "a cat sleeps on a couch",
    "two people walk along the beach",
    "a child plays with a ball in a park",
    "a man rides a bicycle down a street",
    "a woman holds a cup of coffee",
    "a group of friends sit around a table",
    "a plate of food with vegetables and meat",
    "a red car parked beside a building",
    "a train arrives at a station",
    "a boat on a calm lake",
    "mountains covered with snow",
    "the sun sets over the sea",
    "a city skyline at night",
    "a narrow street between old houses",
    "a bridge over a river",
    "a kitchen with a stove and cupboards",
    "a bunch of flowers in a vase",
    "a bird sits on a branch",
    "a horse stands in a meadow",
    "players fight for the ball in a football match",
    "a person throws a frisbee",
    "a baby smiles at the camera",
    "a sign with words on it",
)
"""Written for this purpose. Where none fits an image well the joint encoder still ranks, which is all they are for.
Each costs its pool at every precision: on two cores 24 of them take minutes, on a GPU seconds."""


def read_queries(path: Path) -> list[str]:
    """Distinct queries of a file, in order: one a line, or, where the name ends in .jsonl, one JSON value a line.

    A JSON value is a text, or an object with a member `query`, `text`, `caption` or `captions` (a text or a list).

    Raises:
        UsageError: the file cannot be read, a line is not what it should be, or there is no query.
    """
    try:
        texts = list(_from_json(path)) if path.suffix == ".jsonl" else path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read queries from {path}: {error}") from error
    found = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if not found:
        raise UsageError(f"{path} holds no query; give one a line")
    return found


def _from_json(path: Path) -> Iterator[str]:
    for line in read_json_lines(path):
        try:
            yield from _texts(line.value)
        except ValueError:
            raise UsageError(
                f"{path}, line {line.number}: not a JSON text or an object with one of {', '.join(_MEMBERS)}"
            ) from None


def _texts(value: Any) -> list[str]:
    """ValueError where `value` names no text."""
    if isinstance(value, dict):
        value = next((value[name] for name in _MEMBERS if name in value), None)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return texts
