"""A source that is a plain list of paths: a text file or standard input, with one path per line."""

from __future__ import annotations

import codecs
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import BinaryIO

from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.file_source import FileSource
from pipelines.sources.listed import listed_input
from pipelines.sources.local_file import LocalFile
from pipelines.sources.specs import STANDARD_INPUT, absolute_path, file_name
from storage_formats.errors import UsageError

LINES_SUFFIX = ".txt"
_MAX_LINE = 1 << 16
_streams_read: weakref.WeakSet[BinaryIO] = weakref.WeakSet()


@dataclass
class LinesSource(FileSource):
    """The files that the lines of a list name, in the order of the lines. Blank lines are skipped.

    Relative paths start at the directory of the list, or at the working directory for standard input. A line that is no
    path gives an input with the problem "bad-list-line".

    Raises:
        UsageError: standard input is a terminal. `iter_inputs` also raises this error if standard input has been read
            already.
    """

    kind: str = "lines"

    def __post_init__(self) -> None:
        is_standard_input = self.spec == STANDARD_INPUT
        self.path = b"-" if is_standard_input else absolute_path(self.spec)
        directory = os.path.dirname(os.fsencode(file_name(os.fsdecode(self.path))))
        self._directory = os.fsencode(os.getcwd()) if is_standard_input else directory
        self._file = LocalFile(self.path)
        if is_standard_input and (sys.stdin is None or sys.stdin.isatty()):
            raise UsageError("standard input is a terminal; pipe a list of paths into the command", parameter="sources")

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        with self._open() as file:
            for number, line in enumerate(_lines(file), 1):
                text = None if line is None else os.fsdecode(line.strip())
                if text == "":
                    continue
                ref = listed_input(text, self._directory)
                yield ref or InputRef(f"{display_path(self.path)}#{number}", self.path, problem="bad-list-line")

    def _open(self) -> AbstractContextManager[BinaryIO]:
        if self.spec == STANDARD_INPUT:
            if sys.stdin.buffer in _streams_read:
                raise UsageError(
                    "standard input has been read already, and cannot be read again; write the list to a file that "
                    f"ends in {LINES_SUFFIX}, and give its name",
                    parameter="sources",
                )
            _streams_read.add(sys.stdin.buffer)
            return nullcontext(sys.stdin.buffer)
        return open(self._file.path, "rb")


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for a line that is too long."""
    at_start = True
    while line := file.readline(_MAX_LINE):
        if at_start:
            line, at_start = line.removeprefix(codecs.BOM_UTF8), False
        if line.endswith(b"\n") or len(line) < _MAX_LINE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MAX_LINE)
        yield None
