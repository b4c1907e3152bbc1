"""The type of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]
"""A callback with three arguments: name of the activity, number of units done, and total number of units."""
