"""Finding byte-identical inputs before anything is encoded, so that it depends on nothing but the inputs."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.inputs import InputRef, read_bytes

_MAX_THREADS = 8
_AHEAD = 4  # inputs in work or finished early, for each thread


def mark_duplicates(
    refs: Iterable[InputRef], on_progress: Callable[[int], None] = lambda _: None
) -> Iterator[InputRef]:
    """The same inputs in the same order, each with its content hash, and later copies with `duplicate_of`.

    Row ids are the places in `refs`, from 0. The first of identical inputs is the original. An input that cannot be
    read gets its reason as `problem` and is a duplicate of nothing. Memory: about 200 bytes for each
    distinct content, and the files that the threads hold.

    Args:
        refs: inputs without hashes.
        on_progress: told how many inputs are finished, after each.
    """
    first_row: dict[bytes, int] = {}
    for row, ref in enumerate(_hashed(refs)):
        if ref.content_hash is not None:
            original = first_row.setdefault(bytes.fromhex(ref.content_hash), row)
            if original != row:
                ref = dataclasses.replace(ref, duplicate_of=original)
        yield ref
        on_progress(row + 1)


def _hashed(refs: Iterable[InputRef]) -> Iterator[InputRef]:
    """`refs` in their order, read and hashed by threads a bounded number of inputs ahead."""
    threads = min(_MAX_THREADS, 2 * (os.cpu_count() or 1))
    pending: deque[Future[InputRef]] = deque()
    with ThreadPoolExecutor(threads, "edje-hash") as pool:
        try:
            for ref in refs:
                pending.append(pool.submit(_hash, ref))
                if len(pending) >= threads * _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _hash(ref: InputRef) -> InputRef:
    if ref.problem is not None:
        return ref
    try:
        data = read_bytes(ref)
    except ImageError as error:
        return dataclasses.replace(ref, problem=error.reason)
    return dataclasses.replace(ref, size=len(data), content_hash=content_hash(data))
