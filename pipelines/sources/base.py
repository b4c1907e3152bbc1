"""What every kind of source offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from edje_index.images.inputs import InputRef


class Source(Protocol):
    """Something that names images.

    Attributes:
        spec: what the user wrote.
        kind: "folder", "webdataset", "list" or "image".
        path: the folder or file, absolute, for finding overlaps.
        ignored: of the latest pass: what was found and is no input, counted by suffix (".txt") or nature ("(hidden)").
    """

    spec: str
    kind: str
    path: bytes

    @property
    def ignored(self) -> Mapping[str, int]: ...

    def iter_inputs(self) -> Iterator[InputRef]:
        """Every input once, always in the same order while nothing changes, without holding them all.

        What cannot be read is an input with a problem, never an exception.
        """
        ...
