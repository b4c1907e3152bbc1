"""Reads the queries and texts of `edje-index search` from a file or from a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines.cli.output import note
from storage_formats.errors import UsageError

_PROMPT = "query> "


def read_queries(file: Path) -> list[str]:
    """Return the queries in a file, in order.

    A text file contains one query per line. A .jsonl file contains one object with the key `query` per line. Blank
    lines are skipped.

    Raises:
        UsageError: the file cannot be read, a line of a .jsonl file has no valid query, or there is no query.
    """
    is_json = file.suffix == ".jsonl"
    queries = [
        _query_of(line, f"line {number} of --queries {file}") if is_json else line
        for number, line in _lines(file, "--queries")
    ]
    if not queries:
        raise UsageError(f"--queries {file} contains no query: write one query per line")
    return queries


def read_texts(file: Path) -> list[str]:
    """Return the texts in a file with one text per line, in order. Blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or has no text.
    """
    texts = [line for _, line in _lines(file, "--texts")]
    if not texts:
        raise UsageError(f"--texts {file} contains no text: write one text per line")
    return texts


def _lines(file: Path, option: str) -> list[tuple[int, str]]:
    """Return number and text of each line that is not blank. `option` names the file in error messages."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {option} {file}: {getattr(error, 'strerror', None) or error}; give a UTF-8 text file"
        ) from error
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _query_of(line: str, place: str) -> str:
    try:
        query = json.loads(line)["query"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f'{place} is not an object with the key "query": {line[:80]!r}') from error
    if not isinstance(query, str) or not query.strip():
        raise UsageError(f"{place} must have a non-blank text as its query, got {query!r}")
    return query


def prompt_for_queries() -> Iterator[str]:
    """Yield the queries that a user types, until an empty line or the end of the input.

    Raises:
        UsageError: standard input or standard output is not a terminal, so a user cannot type queries.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("no query: give TEXT, --queries FILE or --image PHOTO")
    note("type a query; an empty line ends the program")
    while query := _typed():
        yield query


def _typed() -> str:
    try:
        return input(_PROMPT).strip()
    except EOFError:
        return ""


def hint_at_image(text: str) -> None:
    """Suggest --image on standard error if `text` is the path of an image file."""
    from edje_index.images.decode import HEAD_BYTES, image_format

    try:
        path = Path(text)
        with path.open("rb") as file:
            is_image = path.is_file() and image_format(file.read(HEAD_BYTES)) is not None
    except (OSError, ValueError):  # a text is seldom a path
        return
    if is_image:
        note(
            f"note: {text} is an image file, but the search uses the path as a text query: did you mean --image {text}?"
        )
