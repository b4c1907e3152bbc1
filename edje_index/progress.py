"""The one type of progress callbacks."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]
"""Called with the name of the activity, how many of its units are done, and how many there are."""
