"""Content hashes and duplicates of inputs, and a digest that shows whether sources have changed."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.inputs import InputRef, metadata_text, read_bytes
from pipelines.progress.events import JobStopped, OnEvent, Progress, ShouldStop
from pipelines.sources.base import ordered_map

_MAX_THREADS = 8
_AHEAD = 4  # inputs per thread that are being hashed or wait for the caller
_REPORT_SECONDS = 0.5  # at least between two progress events
_STOPPED = "stopped while listing the sources"


def mark_duplicates(refs: Iterable[InputRef]) -> Iterator[InputRef]:
    """Yield the inputs with their content hashes. Each duplicate gets the attribute `duplicate_of`.

    `duplicate_of` is the position of the first identical input. An input that cannot be read gets a `problem`. Memory
    use is about 200 bytes per distinct input.
    """
    first_row: dict[bytes, int] = {}
    for row, ref in enumerate(hashed(refs)):
        if ref.content_hash is not None:
            original = first_row.setdefault(bytes.fromhex(ref.content_hash), row)
            if original != row:
                ref = dataclasses.replace(ref, duplicate_of=original)
        yield ref


def hashed(refs: Iterable[InputRef]) -> Iterator[InputRef]:
    """Yield `refs` in order with their content hashes. Threads read and hash a limited number of inputs ahead.

    An input that cannot be read gets a `problem`. An input that already has a content hash is not read.

    Raises:
        TransientInputError: an input cannot be read for a temporary reason.
    """
    threads = min(_MAX_THREADS, 2 * (os.cpu_count() or 1))
    yield from ordered_map(_hash, refs, threads, threads * _AHEAD)


def _hash(ref: InputRef) -> InputRef:
    if ref.problem is not None or ref.content_hash is not None:
        return ref
    try:
        data = read_bytes(ref)
    except ImageError as error:
        return dataclasses.replace(ref, problem=error.reason)
    return dataclasses.replace(ref, size=len(data), content_hash=content_hash(data))


def digested(refs: Iterable[InputRef], digest: Any, on_event: OnEvent, should_stop: ShouldStop) -> Iterator[InputRef]:
    """Yield `refs` unchanged, add each input to `digest`, and report the progress.

    Raises:
        JobStopped: `should_stop()`, which is called before each input and after the last, returned True.
    """
    reported_at = time.monotonic()
    for number, ref in enumerate(refs, 1):
        if should_stop():
            raise JobStopped(_STOPPED)
        digest.update(b"%d %a %a\0" % (ref.offset, ref.size, ref.container and str(ref.container)) + ref.path + b"\0\n")
        if ref.metadata is not None:
            digest.update(metadata_text(ref.metadata).encode())
        if time.monotonic() - reported_at >= _REPORT_SECONDS:
            reported_at = time.monotonic()
            on_event(Progress("listing the sources", number))
        yield ref
    if should_stop():  # Ctrl-C also ends the program that writes a list to standard input, so the list may be cut
        raise JobStopped(_STOPPED)
