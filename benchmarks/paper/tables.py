"""Tables that compare measured values with the values in the EDJE paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.paper.data import MissingDataError
from benchmarks.report import table

Values: TypeAlias = Mapping[str, float | None]
"""Values by column; None for a value that was not measured."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        label: what was measured.
        own: measured values.
        paper: published values; a column may be missing.
        missing: data that are missing to measure this row; empty if no data are missing.
    """

    label: str
    own: Values
    paper: Values
    missing: str = ""


@dataclass
class Table:
    """A repeated table or figure of the EDJE paper.

    Attributes:
        title: what the table shows.
        source: table, figure or section of the EDJE paper.
        columns: names of the columns, with units.
        notes: facts that a reader needs to compare the values.
        rows: the rows.
    """

    title: str
    source: str
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)

    def add(self, label: str, paper: Values | None, measure: Callable[..., Values], *arguments: object) -> None:
        """Measure a row with `measure(*arguments)`, and add it to the table.

        If `measure` raises MissingDataError, the row contains the error message and only the published values.
        """
        try:
            self.rows.append(Row(label, measure(*arguments), paper or {}))
        except MissingDataError as error:
            self.rows.append(Row(label, {}, paper or {}, str(error)))

    @property
    def state(self) -> str:
        """How many rows have measured values: "complete" (all), "partial" (some) or "needs data" (none)."""
        measured = [any(value is not None for value in row.own.values()) for row in self.rows]
        return "complete" if all(measured) else "partial" if any(measured) else "needs data"

    def lines(self) -> list[str]:
        """Return the table as lines of Markdown."""
        rows = [
            [row.label, *(_cell(row.own.get(name), row.paper.get(name)) for name in self.columns)] for row in self.rows
        ]
        first_without = {row.missing: row.label for row in reversed(self.rows) if row.missing}
        missing = [f"{label} was not measured: {text}" for text, label in reversed(first_without.items())]
        head = [f"## {self.title}", "", f"{self.source}. Each cell: measured value (published value).", ""]
        return [*head, *table(("", *self.columns), rows), "", *(f"- {note}" for note in (*self.notes, *missing))]

    def as_json(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        rows = [
            {"label": row.label, "own": dict(row.own), "paper": dict(row.paper), "missing": row.missing or None}
            for row in self.rows
        ]
        return {"title": self.title, "source": self.source, "state": self.state, "rows": rows, "notes": self.notes}


def _cell(own: float | None, paper: float | None) -> str:
    left = "-" if own is None else f"{own:,.1f}" if abs(own) >= 1 else f"{own:.3g}"
    return left if paper is None else f"{left} ({paper:.4g})"
