"""The `edje-index` command line. The module of a command is imported only when the
command is used.
"""

from __future__ import annotations

from pipelines.cli.main import main

__all__ = ["main"]
