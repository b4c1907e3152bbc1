"""Keeps Python's garbage collector away from large libraries.

torch, open_clip and transformers create about a million objects that live until the
process ends. By default, the collector visits them many times during their import, and
again at the end of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Context manager for imports: no garbage is collected in it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def skip_collection_at_exit() -> None:
    """Let the process end without a last collection. Its memory goes back to the
    operating system anyway.
    """
    atexit.register(gc.freeze)
