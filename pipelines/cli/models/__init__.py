"""The commands of `edje-index model`."""

from __future__ import annotations
