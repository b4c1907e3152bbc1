"""Keeps Python's garbage collector away from large libraries.

torch, open_clip and transformers create about a million objects that live until the
process ends. By default, the collector visits them many times during their import,
three times soon after it, and again at the end of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

_owns_process = False


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Context manager for imports: no garbage is collected in it. After
    `own_process`, the collector never visits what was created in it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _owns_process:
            gc.freeze()
        if was_enabled:
            gc.enable()


def own_process() -> None:
    """Say that nobody else's objects are in this process, which ends after one command.
    It then ends without a last collection.
    """
    global _owns_process
    _owns_process = True
    # its memory goes back to the operating system anyway
    atexit.register(gc.freeze)
