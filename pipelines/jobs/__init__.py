"""Jobs: the work of the commands, independent of the command line."""

from __future__ import annotations
