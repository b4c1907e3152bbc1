"""Jobs: what a command does, free of any command line."""

from __future__ import annotations
