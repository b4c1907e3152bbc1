"""What the reports of all benchmarks share: median ratios, and the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Say: TypeAlias = Callable[[str], None]
"""Receives one line of text after each measurement."""


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median of the ratios of paired measurements, which were made right
    after each other.
    """
    return statistics.median(
        a / b for a, b in zip(numerators, denominators, strict=True)
    )


def machine(environment: dict[str, Any]) -> str:
    """Return one sentence about the machine and the versions of the libraries."""
    versions = ", ".join(
        f"{name} {version}" for name, version in environment["versions"].items()
    )
    return (
        f"{environment['cores']} cores of {environment['processor']},"
        f" {environment['memory_gib']} GiB, Linux {environment['kernel']}, Python"
        f" {environment['python']}, {versions}."
    )
