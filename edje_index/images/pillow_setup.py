"""Sets up Pillow once per process: no warnings, and no output of libtiff."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile

_this_thread = threading.local()
_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


@functools.cache
def openers() -> dict[str, Any]:
    """Return the functions with which Pillow opens files, by format name."""
    Image.init()
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # otherwise its errors go to stderr
    _silence_libtiff()
    return {name: opener for name, (opener, _) in Image.OPEN.items()}


def ignore_warnings() -> None:
    """Suppress all warnings of Pillow in this process."""
    # `warnings.catch_warnings` around each call would not be thread-safe.
    if not warnings.filters or warnings.filters[0] != _WARNINGS:
        warnings.filterwarnings("ignore", module=r"PIL\.")


@contextlib.contextmanager
def loading_truncated() -> Iterator[None]:
    """Context manager in which Pillow loads truncated files in this thread. Other threads are not affected."""
    setting: Any = ImageFile.LOAD_TRUNCATED_IMAGES
    if not isinstance(setting, _PerThread):
        setting = _PerThread(setting)
        ImageFile.LOAD_TRUNCATED_IMAGES = setting
    _this_thread.loads_truncated = True
    try:
        yield
    finally:
        _this_thread.loads_truncated = False


class _PerThread:
    """A value for Pillow's global setting LOAD_TRUNCATED_IMAGES. It is true in threads inside `loading_truncated`.

    In all other threads, its truth value is `otherwise`, the earlier value of the setting.
    """

    def __init__(self, otherwise: bool) -> None:
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return getattr(_this_thread, "loads_truncated", False) or self._otherwise


def _silence_libtiff() -> None:
    """Remove the default handlers of libtiff, which print errors and warnings."""
    # Pillow has no function for this, so the library is looked up in /proc. Without /proc nothing changes.
    with contextlib.suppress(OSError, AttributeError):
        for path in {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtiff" in line
        }:
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)
