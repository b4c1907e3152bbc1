"""Small files on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON for machines and people: sorted keys, indented, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
