"""Finds byte-identical inputs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.inputs import InputRef, read_bytes
from storage_formats.ordered_results import ordered_results

_MAX_THREADS = 8
_AHEAD = 4  # inputs per thread that are being hashed or wait for the caller


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
    with ThreadPoolExecutor(threads, "edje-hash") as pool:
        try:
            yield from ordered_results(refs, lambda ref: pool.submit(_hash, ref), ahead=threads * _AHEAD)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _hash(ref: InputRef) -> InputRef:
    if ref.problem is not None or ref.content_hash is not None:
        return ref
    try:
        data = read_bytes(ref)
    except ImageError as error:
        return dataclasses.replace(ref, problem=error.reason)
    return dataclasses.replace(ref, size=len(data), content_hash=content_hash(data))
