"""One-time setup of Pillow for decoding untrusted files: its openers, without output on the terminal.

The row of an input records what failed. Pillow's warnings and log, and the lines that libtiff prints about damaged
files, would only clutter the terminal.
"""

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
    """Pillow's opener of each format. An opener reports what is wrong; `Image.open` only says "cannot identify"."""
    Image.init()
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # otherwise its errors go to stderr
    _silence_libtiff()
    return {name: opener for name, (opener, _) in Image.OPEN.items()}


def ignore_warnings() -> None:
    """Suppress Pillow's warnings for the whole process, again if other code has replaced the filter.

    `warnings.catch_warnings` around each call would not be thread-safe.
    """
    if not warnings.filters or warnings.filters[0] != _WARNINGS:
        warnings.filterwarnings("ignore", module=r"PIL\.")


def _silence_libtiff() -> None:
    """Remove libtiff's default handlers, which print. Pillow has no call for it; without /proc nothing changes."""
    with contextlib.suppress(OSError, AttributeError):
        for path in {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtiff" in line
        }:
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)
