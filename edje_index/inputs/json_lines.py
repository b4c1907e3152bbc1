"""Splits texts into lines, and reads JSON Lines files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def text_lines(text: str) -> list[str]:
    """Return the lines of a text without surrounding whitespace. Blank lines are left
    out.

    A line ends with a line feed, a carriage return, or both. `str.splitlines` would
    also split at characters that are part of a line, such as U+2028 and the form feed.
    """
    lines = io.StringIO(text, newline=None)
    return [stripped for line in lines if (stripped := line.strip())]


def read_json_lines(path: str | bytes | Path) -> Iterator[tuple[int, Any, str]]:
    """Parse a JSON Lines file with `parse_json_lines`."""
    with open(path, "rb") as file:
        yield from parse_json_lines(file)


def parse_json_lines(
    lines: Iterable[bytes], decode_errors: str = "strict"
) -> Iterator[tuple[int, Any, str]]:
    """Yield (line number, value, "") for each line in JSON, or (line number, None,
    error) if a line is not JSON.

    Lines are counted from 1. Blank lines are counted, but not yielded.

    Args:
        lines: the lines of a file in UTF-8.
        decode_errors: error handler for bytes that are not UTF-8, as in `bytes.decode`.
    """
    for number, line in enumerate(lines, 1):
        if line.strip(b" \t\r\n\xef\xbb\xbf"):
            try:
                value = json.loads(line.decode("utf-8-sig", decode_errors))
                yield number, value, ""
            except UnicodeDecodeError as error:
                yield number, None, f"the text is not UTF-8: {error}"
            except (ValueError, RecursionError) as error:
                yield number, None, f"the text is not JSON: {error}"
