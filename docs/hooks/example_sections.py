"""Griffe extension: reads sections "Example:" of docstrings as examples."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):  # type: ignore[misc]
    """Renames the sections before the docstrings are parsed, because the Google style knows only "Examples:"."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
