"""Renders the page templates. Every value is HTML-escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"


@name_missing_extra("search")
def render(template: str, **values: Any) -> str:
    """Render the template `templates/<template>` with `values`. Return the HTML page."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from edje_index import __version__
    from pipelines.progress.wording import human_bytes, printable

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=human_bytes, printable=printable)
    environment.globals["version"] = __version__
    return environment
