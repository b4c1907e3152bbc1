"""What the reports of all benchmarks share: median ratios, Markdown tables, and the
files of a report.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)
    ]


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


def write_report(
    report: dict[str, Any], folder: Path, name: str, lines: Sequence[str]
) -> list[Path]:
    """Write `<date>-<name>.md` with `lines` and `<date>-<name>.json` to `folder`.
    Return both paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, data = (
        folder / f"{report['environment']['date']}-{name}.{suffix}"
        for suffix in ("md", "json")
    )
    text.write_text("\n".join(lines) + "\n")
    data.write_text(json.dumps(report, indent=1, sort_keys=True, default=str) + "\n")
    return [text, data]
