"""The command line, `edje-index`. The only package that imports click; each command is loaded when it is asked for."""

from __future__ import annotations

from pipelines.cli.main import main

__all__ = ["main"]
