"""Execution engines: ways to run independent tasks on long-lived workers."""

from __future__ import annotations
