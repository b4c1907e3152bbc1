"""The report of a benchmark: Markdown, a picture, and JSON.

A report is a JSON object:

    name, title    name of the command and heading
    command        command line that repeats the benchmark
    settings       further values that determine the results
    environment    hardware and versions; `disk` and `load` are optional
    subjects       [version, setting] by subject
    reference      subject that all others of a table are compared with
    overview       title of a table with the first table and case of every group
    verdict        first sentences
    notes          warnings and remarks
    method         how the measurements are made and what the columns mean
    rows           results, see `benchmarks.harness.summaries`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from edje_index.evaluation.report import table, write_report

Report: TypeAlias = dict[str, Any]
"""A report, or a part of it, as a JSON object."""

# A row is called faster than the reference if the rate of the reference is less than
# this fraction of its rate.
_FASTER = 0.95
# number of panels per line of the picture
_PANELS = 3
DEVICE = "the device"
"""Name of the subject that is the disk itself. The disk is never called faster."""


def write(report: Report, folder: Path, *, draws: bool = False) -> None:
    """Write the report to the directory `folder`. The names of the files begin with the
    date and the name of the benchmark. A picture is drawn only if `draws` is True.
    """
    name = f"{report['environment']['date']}-{report['name']}"
    picture = f"{name}.png" if draws else None
    if picture:
        draw(report["rows"], folder / picture)
    text = "\n".join(report_lines(report, picture))
    write_report(folder, text + "\n", report, name)


def report_lines(report: Report, picture_name: str | None = None) -> Iterator[str]:
    """Yield the lines of the report in Markdown."""
    where = report["environment"]
    rows = report["rows"]
    yield f"# {report['title']}, {where['date']}\n"
    yield from (f"- {line}" for line in report["verdict"])
    yield ""
    if picture_name:
        yield f"![Rates]({picture_name})\n"
    rated = [row for row in rows if row["ratio"] is not None]
    firsts = {row["group"]: row["table"] for row in reversed(rated)}
    if report["overview"]:
        cold = select(rated, case="cold")
        first = [row for row in cold if row["table"] == firsts[row["group"]]]
        yield from _crosstab(report, report["overview"], first, ["group"])
    for group in dict.fromkeys(row["group"] for row in rated):
        of_group = select(rated, group=group)
        yield from _crosstab(report, f"All of {group}", of_group, ["table", "case"])
    versions = ", ".join(f"{name} {each}" for name, each in where["versions"].items())
    yield (
        f"## Machine\n\n{where['cores']} cores of {where['processor']},"
        f" {where['memory_gib']} GiB, Linux {where['kernel']}, Python"
        f" {where['python']}, {versions}."
    )
    yield from (
        f"\n{name}: {where[name]}." for name in ("disk", "load") if name in where
    )
    yield f"\nThis command repeats the benchmark:\n\n    {report['command']}"
    for group, name in dict.fromkeys((row["group"], row["table"]) for row in rows):
        of_table = select(rows, group=group, table=name)
        columns = dict.fromkeys(name for row in of_table for name in row["values"])
        yield f"\n## {group}: {name}\n"
        lines = []
        for row in of_table:
            cells = {name: number_text(value) for name, value in row["values"].items()}
            for first in [*cells][:1]:
                cells[first] += " ({} - {})".format(*map(number_text, row["range"]))
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            numbers = [cells.get(column, "") for column in columns]
            lines.append([row["subject"], row["case"], ratio, *numbers])
        yield from table(("", "case", f"{report['reference']} / row", *columns), lines)
        yield "\n```sh"
        yield from dict.fromkeys(row["command"] for row in of_table)
        yield "```"
    yield "\n## Settings, notes and discarded runs\n"
    for subject, (version, setting) in report["subjects"].items():
        yield f"- {subject}, {version}: {setting}."
    yield from (f"- {line}" for line in report["notes"])
    for row in rows:
        names = ", ".join(row[key] for key in ("group", "table", "subject", "case"))
        yield from (f"- {names}: {problem}" for problem in row["problems"])
    yield (
        "\n## Method\n\nEvery run is a process of its own, and the subjects of a table"
        " take turns. Values are medians over the runs that count. The first value is"
        " a rate; in brackets, its range. Runs with a problem are listed above and do"
        f" not count.\n\n{report['method']}"
    )


def faster(report_rows: Sequence[Report], reference: str) -> Iterator[str]:
    """Yield one sentence for each case in which a subject is faster than `reference`,
    with its factor in every group.
    """
    cases = dict[str, list[str]]()
    for row in report_rows:
        if _is_faster(row):
            case = f"{row['subject']}, {row['case']}, {row['table']}"
            text = f"{1 / row['ratio']:.1f} ({row['group']})"
            cases.setdefault(case, []).append(text)
    for case, factors in cases.items():
        yield f"Faster than {reference}: {case}, by {', '.join(factors)}."


def select(rows: Sequence[Report], **values: object) -> list[Report]:
    """Return the rows whose members equal `values`."""
    return [row for row in rows if all(row[key] == values[key] for key in values)]


def draw(rows: Sequence[Report], path: Path) -> None:
    """Draw a picture with one panel for each table and case that compares several
    subjects. A bar shows the rate of a subject.
    """
    from matplotlib.figure import Figure

    panels = dict[str, list[Report]]()
    for row in rows:
        for unit in [*row["values"]][:1]:
            title = f"{row['group']}: {row['table']}\n{row['case']}, {unit}"
            panels.setdefault(title, []).append(row)
    panels = {
        title: of_panel for title, of_panel in panels.items() if len(of_panel) > 1
    }
    lines = -(-len(panels) // _PANELS) or 1
    figure = Figure(figsize=(15, 3 * lines), layout="constrained")
    axes = figure.subplots(lines, _PANELS, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (title, of_panel) in zip(axes, panels.items(), strict=False):
        rates = [_first(row) for row in of_panel]
        bars = axis.barh([row["subject"] for row in of_panel], rates)
        axis.bar_label(bars, map(number_text, rates), padding=3)
        axis.set_title(title, fontsize="medium")
        axis.invert_yaxis()
        axis.margins(x=0.2)
    figure.savefig(path, dpi=110)


def number_text(value: float) -> str:
    """Return a number with three digits, or without decimal places."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _crosstab(
    report: Report, title: str, rows: Sequence[Report], keys: Sequence[str]
) -> Iterator[str]:
    """Yield a table of rates with one line per subject. The members `keys` of a row
    name its column.
    """
    cells = dict[str, dict[str, str]]()
    for row in rows:
        text = number_text(_first(row))
        if row["ratio"] is not None:
            text += f" ({row['ratio']:.2f})"
        name = f"{row['subject']}, {report['subjects'][row['subject']][0]}"
        column = ", ".join(row[key] for key in keys)
        cells.setdefault(name, {})[column] = f"**{text}**" if _is_faster(row) else text
    if not rows:
        return
    columns = dict.fromkeys(", ".join(row[key] for key in keys) for row in rows)
    unit = next(iter(rows[0]["values"]))
    yield f"## {title}, {unit} ({report['reference']} / row)\n"
    lines = (
        [name, *(of_subject.get(column, "") for column in columns)]
        for name, of_subject in cells.items()
    )
    yield from table(("", *columns), lines)
    yield ""


def _is_faster(row: Report) -> bool:
    return row["subject"] != DEVICE and (row["ratio"] or 1) < _FASTER


def _first(row: Report) -> float:
    return float(next(iter(row["values"].values())))
