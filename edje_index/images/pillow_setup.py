"""Sets up Pillow once per process: no warnings, and no output of libtiff."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
import warnings
from pathlib import Path
from typing import Any

from PIL import Image

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
