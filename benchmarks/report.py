"""What the reports of all benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Report: TypeAlias = dict[str, Any]
"""A report, or a part of it, as a JSON object."""
Say: TypeAlias = Callable[[str], None]
"""Receives one line of text after each measurement."""


def machine(environment: Report) -> str:
    """Return one sentence about the machine and the versions of the libraries."""
    versions = ", ".join(
        f"{name} {version}" for name, version in environment["versions"].items()
    )
    return (
        f"{environment['cores']} cores of {environment['processor']},"
        f" {environment['memory_gib']} GiB, Linux {environment['kernel']}, Python"
        f" {environment['python']}, {versions}."
    )
