"""The application: sources of images, execution engines, jobs, and the command line.

Each job is a function whose options are keyword arguments. `edje_index` has the public
names, which can be imported from here, too.
"""

from __future__ import annotations

from typing import Any

import edje_index


def __getattr__(name: str) -> Any:
    return getattr(edje_index, name)
