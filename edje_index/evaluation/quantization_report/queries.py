"""Queries to compare rankings with: queries from a file, or built-in captions."""

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
"""The built-in queries. A query need not match any image: the joint encoder ranks the candidates of any query.
The list is short because every precision re-ranks each query. 24 queries take minutes on two CPU cores, and seconds on
a GPU."""


def read_queries(path: Path) -> list[str]:
    """Read the distinct queries in a file, in the order of the file.

    The file has one query per line. In a ``.jsonl`` file, a line is a JSON string, or an object with one of the members
    `query`, `text`, `caption` and `captions`.

    Raises:
        UsageError: the file cannot be read, a line is not valid, or there is no query.
    """
    try:
        texts = list(_json_texts(path) if path.suffix == ".jsonl" else path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read queries from {path}: {error}; check the path and the permissions") from error
    queries = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if not queries:
        raise UsageError(f"{path} contains no query: write one query per line")
    return queries


def _json_texts(path: Path) -> Iterator[str]:
    for line in read_json_lines(path):
        texts = None if line.error else _texts(line.value)
        if texts is None:
            raise UsageError(
                f"{path}, line {line.number}: a query must be a JSON string, or an object with one of the members "
                f"{', '.join(_MEMBERS)}"
            )
        yield from texts


def _texts(value: Any) -> list[str] | None:
    """Return the queries in a JSON value. Return None if the value is not valid."""
    if isinstance(value, dict):
        value = next((value[name] for name in _MEMBERS if name in value), None)
    texts = value if isinstance(value, list) else [value]
    return texts if all(isinstance(text, str) for text in texts) else None
