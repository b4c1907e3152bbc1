"""The members of archives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive.

    Attributes:
        name: name in the archive, as bytes.
        offset: position of the member. The kind of the archive defines its meaning.
        size: declared number of bytes of the content.
        problem: reason why the member cannot be read; None if it can be read.
    """

    name: bytes
    offset: int
    size: int
    problem: str | None = None


class OpenContainer(Protocol):
    """An open file that packs inputs. Thread-safe."""

    def read(self, offset: int, size: int, max_bytes: int) -> bytes:
        """Return the content of an input.

        Args:
            offset: position of the input, see `InputRef`.
            size: number of bytes of the input when the plan was made; 0 if unknown.
            max_bytes: largest number of bytes of an input.

        Raises:
            ImageError: the file is damaged or has changed, or the input is larger than `max_bytes`.
            OSError: the file cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Archive(OpenContainer, Protocol):
    """An open archive.

    Attributes:
        is_stream: True if the members are listed by reading through the file. Then the members of a sample, for example
            an image and its caption, are next to each other.
    """

    is_stream: bool

    def members(self) -> Iterator[Member]:
        """Yield the files in the order of the archive.

        Raises:
            ImageError: the archive is damaged after the last yielded member.
            OSError: the file cannot be read.
        """
        ...
