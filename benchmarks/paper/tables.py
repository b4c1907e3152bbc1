"""Tables that compare measured values with the values in the EDJE paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.data import MissingDataError

Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        label: what was measured.
        own: measured values by column; None for a value that was not measured.
        paper: published values by column; a column may be missing.
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

    def add(self, label: str, measure: Callable[[], Values], paper: Values | None = None) -> None:
        """Measure a row and add it to the table.

        If `measure` raises MissingDataError, the row contains the error message and only the published values.

        Args:
            label: label of the row.
            measure: function that returns the measured values by column.
            paper: published values by column.
        """
        try:
            own, missing = measure(), ""
        except MissingDataError as error:
            own, missing = {}, str(error)
        self.rows.append(Row(label, own, paper or {}, missing))

    @property
    def state(self) -> str:
        """How many rows have measured values: "complete" (all), "partial" (some) or "needs data" (none)."""
        measured = [any(value is not None for value in row.own.values()) for row in self.rows]
        return "complete" if all(measured) else "partial" if any(measured) else "needs data"

    def lines(self) -> list[str]:
        """Return the table as lines of Markdown."""
        lines = [f"## {self.title}", "", f"{self.source}. Each cell: measured value (published value).", ""]
        lines += ["| | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        for row in self.rows:
            cells = (_cell(row.own.get(name), row.paper.get(name)) for name in self.columns)
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
        missing = {row.missing: row.label for row in reversed(self.rows) if row.missing}
        notes = [*self.notes, *(f"{label} was not measured: {text}" for text, label in reversed(missing.items()))]
        return [*lines, "", *(f"- {note}" for note in notes)]

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
