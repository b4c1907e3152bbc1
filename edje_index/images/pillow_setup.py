"""Pillow, set up once for a program that decodes whatever it is given: its openers, and silence.

What became of an input is said by its row, so neither Pillow's warnings and log nor the lines that libtiff prints
by itself on damaged files belong on the user's screen.
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
    """Pillow's opener of each format. Calling one says what is wrong where `Image.open` says "cannot identify"."""
    Image.init()
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # without handlers, its errors would go to stderr
    _silence_libtiff()
    return {name: opener for name, (opener, _) in Image.OPEN.items()}


def ignore_warnings() -> None:
    """Let no warning of Pillow's through: a filter of the process, put back where something has replaced it.

    `warnings.catch_warnings` around each call would not be safe among threads.
    """
    if not warnings.filters or warnings.filters[0] != _WARNINGS:
        warnings.filterwarnings("ignore", module=r"PIL\.")


def _silence_libtiff() -> None:
    """Take away libtiff's default handlers, which print. Pillow offers no call for it; without /proc they stay."""
    with contextlib.suppress(OSError, AttributeError):
        for path in {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libtiff" in line
        }:
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)
