"""The text that names a source: a path, a pattern, or "-" for standard input."""

from __future__ import annotations

import os

from edje_index.images.inputs import display_path

STANDARD_INPUT = "-"


def absolute_spec(spec: str) -> str:
    """Return a source as the index records it, so that it means the same in every working directory."""
    return spec if spec == STANDARD_INPUT else display_path(os.fsencode(os.path.abspath(spec)))
