"""Tables that show own figures beside those of the paper."""

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
        own: own figures by column; None if a figure was not measured.
        paper: figures of the paper by column; a column may be missing.
        missing: data that are missing for this row; empty if nothing is missing.
    """

    label: str
    own: Values
    paper: Values
    missing: str = ""


@dataclass
class Table:
    """A table or figure of the paper, repeated.

    Attributes:
        title: what the table shows.
        source: table, figure or section of the paper.
        columns: names of the columns, with their units.
        rows: the rows.
        notes: what a reader must know to compare the figures.
    """

    title: str
    source: str
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)

    def add(self, label: str, measure: Callable[[], Values], paper: Values | None = None) -> None:
        """Add a row. If data are missing, the row says so and has the figures of the paper alone."""
        try:
            own, missing = measure(), ""
        except MissingDataError as error:
            own, missing = {}, str(error)
        self.rows.append(Row(label, own, paper or {}, missing))

    @property
    def state(self) -> str:
        """How much of the table has own figures: "complete", "partial" or "needs data"."""
        measured = [any(value is not None for value in row.own.values()) for row in self.rows]
        return "complete" if all(measured) else "partial" if any(measured) else "needs data"

    def lines(self) -> list[str]:
        """Return the table as lines of Markdown."""
        lines = [f"## {self.title}", "", f"{self.source}. Each cell: own figure (figure of the paper).", ""]
        lines += ["| | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        for row in self.rows:
            cells = (_cell(row.own.get(name), row.paper.get(name)) for name in self.columns)
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
        missing = {row.missing: row.label for row in reversed(self.rows) if row.missing}
        notes = [*self.notes, *(f"{label} needs {text}" for text, label in reversed(missing.items()))]
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
