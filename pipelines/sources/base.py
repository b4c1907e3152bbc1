"""The interface that all kinds of sources implement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from edje_index.images.inputs import InputRef


class Source(Protocol):
    """A source of images and clips.

    Attributes:
        spec: the source as the user wrote it.
        kind: "folder", "image" (one image file), "webdataset" (tar archive), "zip", "parquet" (images in a Parquet
            file), "archive" (one of these three, not opened yet), "list" (table with a path column), "lines" (text
            file with one path per line) or "captions" (caption file).
        path: absolute path of the directory or file.
        clips: True if video files are inputs, too.
        ignored: number of entries that are not inputs, in the latest pass over the source. Keys are suffixes (".txt")
            or reasons ("(hidden)").
    """

    spec: str
    kind: str
    path: bytes
    clips: bool

    @property
    def ignored(self) -> Mapping[str, int]: ...

    def iter_inputs(self) -> Iterator[InputRef]:
        """Yield every input once, always in the same order.

        An entry that cannot be read becomes an input with a `problem`.
        """
        ...
