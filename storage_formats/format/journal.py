"""The journal of the change that is under way (SPEC.md section 11)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass

from storage_formats.atomic import Json, fsync_path, json_bytes
from storage_formats.errors import EdjeError
from storage_formats.format.checksum import json_checksum, with_checksum
from storage_formats.format.file_check import parsing
from storage_formats.format.places import Place, open_place


@dataclass(frozen=True)
class Journal:
    """The contents of `build/journal.json`, which describes the change that is under
    way.

    Attributes:
        kind: kind of the change, for example "append".
        request: JSON object that says what the change was asked to do. A change that is
            stopped is resumed by a later change with the same kind and an equal
            request.
        base: SHA-256 in hexadecimal of the `index.json` before the change. None if the
            change writes a new index.
        plan: JSON object that the change stored before its first task, so that a later
            run continues in the same way. None if no plan was stored.
    """

    kind: str
    request: Json
    base: str | None
    plan: Json | None = None

    def write(self, place: Place) -> None:
        """Write the journal of the index at `place`."""
        place.write(place.journal, json_bytes(with_checksum(vars(self))))


def read_journal(place: Place) -> Journal | None:
    """Return the journal of the unfinished change of the index at `place`; None if
    there is none.
    """
    advice, remedy = how_to_discard(place)
    what = f"{place.address(place.journal)}, which names the unfinished change"
    with parsing(what, advice, remedy):
        data = place.read(place.journal)
        if data is None:
            return None
        value = json.loads(data)
        if value.pop("crc32c") != json_checksum(value):
            raise ValueError("it does not match its checksum")
        return Journal(**value)


def unfinished_journal(place: Place) -> Journal | None:
    """Return the journal of the index at `place` if its change was stopped before
    the commit; None otherwise.
    """
    journal = read_journal(place)
    # A commit replaces `index.json`, which then has another digest than `base`.
    if journal is None or journal.base != manifest_digest(place):
        return None
    return journal


def how_to_discard(place: Place) -> tuple[str, str | None]:
    """Return the advice for an error message on how to discard the unfinished change of
    an index, and the value of the attribute `remedy` of that error.
    """
    if place.manifest.exists():
        return "discard it", "discard"
    return f"delete {place.location}", None


def manifest_digest(place: Place) -> str | None:
    """Return the SHA-256 of `index.json` in hexadecimal; None if there is none."""
    data = place.read(place.manifest)
    return None if data is None else hashlib.sha256(data).hexdigest()


def end_erasure(place: Place) -> None:
    """Move the files of an erasure into place if a process was killed after its commit.
    Until then, the files of the index do not match `index.json`. Does nothing if the
    index cannot be written or another process is changing it.
    """

    def is_left(place: Place) -> bool:
        # The files of an erasure that is not committed belong to a writer.
        return bool(place.names(place.erased)) and unfinished_journal(place) is None

    # A reader may lack the permission to write, so errors are ignored.
    with contextlib.suppress(OSError, EdjeError):
        if is_left(place):
            with open_place(place.location) as writer, writer.claimed():
                if is_left(writer):
                    # The former files may be replaced only after `index.json` is
                    # durable.
                    fsync_path(writer.root)
                    writer.move_erased()
