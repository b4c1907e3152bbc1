"""Saves the time that Python's garbage collector spends on the objects of large
libraries.

torch, open_clip and transformers create about a million objects that live until the
process ends. By default, the collector visits these objects many times while the
libraries are imported, three times soon afterwards, and once more at the end of the
process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

_owns_process = False


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector inside the context, in which libraries are imported.

    If `own_process` was called before, the collector never visits the objects that
    exist at the end of the context.
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
    """Declare that this process runs one command and no other program's code.

    `paused_collector` then exempts all objects of the process from collection, and the
    process ends without a last collection.
    """
    global _owns_process
    _owns_process = True
    # Python collects garbage once more when the process ends. Frozen objects are left
    # out, so this collection takes no time. The operating system takes back the memory
    # of the process anyway.
    atexit.register(gc.freeze)
