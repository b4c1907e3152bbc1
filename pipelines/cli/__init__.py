"""The command line, `edje-index`. Every command is imported when it is used."""

from __future__ import annotations

from pipelines.cli.main import main

__all__ = ["main"]
