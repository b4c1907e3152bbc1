"""Writes the quantization report as a table, a Markdown page and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.quantization import Distribution, PrecisionCost, QuantizationReport

_PLOT = "quality.png"
_RANKING = ("top-1 kept", "Kendall tau", "tau p5", "overlap@10", "score change", "in std")
_DISTRIBUTION = ("p1", "p5", "p50", "mean", "p95", "p99", "worst")


def write_report(report: QuantizationReport, folder: Path) -> None:
    """Write report.json, report.md and quality.png to the directory `folder`. A missing directory is created.

    Raises:
        UsageError: `folder` is not a directory.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text("\n".join(markdown(report)) + "\n", encoding="utf-8")
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{folder} is not a directory; choose another directory for the report") from None
    plot(report, folder / _PLOT)


def table(report: QuantizationReport) -> list[str]:
    """Return the report as lines of plain text, for a terminal."""
    rows = [
        ["precision", "bytes/image", "error p50", "error p99", "worst", "cosine p50", "cosine p1", "worst", *_RANKING]
    ]
    rows.append([report.reference, f"{report.reference_bytes_per_image:,}", *["-"] * (len(rows[0]) - 2)])
    for cost in report.precisions:
        errors = ["-"] * 6
        if cost.tokens is not None:
            error, cosine = cost.tokens.relative_error, cost.tokens.cosine
            errors = [f"{value:.4f}" for value in (error.p50, error.p99, error.highest)]
            errors += [f"{value:.5f}" for value in (cosine.p50, cosine.p1, cosine.lowest)]
        rows.append([cost.name, f"{cost.bytes_per_image:,}", *errors, *_ranking(cost)])
    if not report.queries:
        rows = [row[: -len(_RANKING)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(cells))
        for cells in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    return [*lines, "", *_notes(report)]


def markdown(report: QuantizationReport) -> list[str]:
    """Return the report as lines of Markdown."""
    m, d = report.block_shape
    lines = [f"# What each precision costs on {report.index}", ""]
    lines += [f"{report.rows:,} rows, blocks of {m} x {d}."]
    lines += [f"{line[0].upper()}{line[1:]}" for line in _notes(report)]
    lines += ["", f"![quality against size]({_PLOT})", "", "## Size", ""]
    sizes = [[report.reference, f"{report.reference_bytes_per_image:,}", "1.00", "yes"]]
    for cost in report.precisions:
        share = cost.bytes_per_image / report.reference_bytes_per_image
        stored = "yes" if cost.stored else "no: encoded in memory"
        sizes.append([cost.name, f"{cost.bytes_per_image:,}", f"{share:.2f}", stored])
    lines += _markdown_table(["precision", "bytes per image", f"of {report.reference}", "stored"], sizes)
    measured = [(cost.name, cost.tokens) for cost in report.precisions if cost.tokens is not None]
    lines += ["", f"## Relative error of a token, |token - {report.reference}| / |{report.reference}|", ""]
    errors = [[name, *_spread(each.relative_error, ".4g", each.relative_error.highest)] for name, each in measured]
    lines += _markdown_table(["precision", *_DISTRIBUTION], errors)
    lines += ["", f"## Cosine similarity of a token with {report.reference}", ""]
    cosines = [[name, *_spread(each.cosine, ".6f", each.cosine.lowest)] for name, each in measured]
    lines += _markdown_table(["precision", *_DISTRIBUTION], cosines)
    if report.queries:
        lines += ["", f"## Re-ranking, against {report.reference}", ""]
        lines += _markdown_table(["precision", *_RANKING], [[cost.name, *_ranking(cost)] for cost in report.precisions])
        lines += [
            "",
            "Tau p5: 5 % quantile of Kendall's tau over the queries. Score change: mean absolute change of a score.",
            "In std: mean absolute change of a score, divided by the standard deviation of the query's scores.",
        ]
    return lines


def plot(report: QuantizationReport, path: Path) -> None:
    """Plot quality against kB per image, and write the plot to `path`.

    The quality is Kendall's tau if re-ranking was measured, otherwise the cosine similarity of the tokens.
    """
    from edje_index.evaluation.plots import COLOURS, new_figure, plain_ticks, save_figure

    what = f"Kendall's tau against {report.reference}" if report.queries else f"cosine with {report.reference}"
    figure, axes = new_figure("Quality against size", "kB per image (log scale)", f"{what}: mean, p5 to p95")
    axes.set_xscale("log")
    points = [(report.reference_bytes_per_image / 1000, 1.0, report.reference)]
    for cost in report.precisions:
        if quality := _quality(cost, ranked=report.queries > 0):
            kilobytes = cost.bytes_per_image / 1000
            axes.plot([kilobytes] * 2, [quality.p5, quality.p95], color=COLOURS[5], linewidth=2, zorder=2)
            points.append((kilobytes, quality.mean, cost.name))
    axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=32, color=COLOURS[0], zorder=3)
    for x, y, name in points:
        axes.annotate(name, (x, y), (6, 4), textcoords="offset points", fontsize=9, rotation=30)
    plain_ticks(axes, [x for x, _, _ in points])
    axes.margins(x=0.14, y=0.2)
    save_figure(figure, path)


def _quality(cost: PrecisionCost, *, ranked: bool) -> Distribution | None:
    if ranked:
        return cost.ranking.kendall_tau if cost.ranking else None
    return cost.tokens.cosine if cost.tokens else None


def _notes(report: QuantizationReport) -> list[str]:
    """Return notes on the sample, the queries and the reference, one per line."""
    left_out = f"; {report.holes:,} of them are holes and were left out" if report.holes else ""
    lines = [f"tokens: a sample of {report.sampled_rows:,} rows{left_out}."]
    if not report.queries:
        lines.append(f"re-ranking was not measured: {report.ranking_left_out}.")
    else:
        lines.append(
            f"re-ranking: {report.queries:,} queries ({report.query_source}), {report.pool:,} candidates each."
        )
        if not report.trained:
            lines.append("the model is untrained: changes of the ranking have no meaning.")
    if report.reference != "bf16":
        lines.append(f"the reference is {report.reference}. Its own errors are not included.")
    elif lossy := [name for name in report.reference_encoded_from if name != "bf16"]:
        lines.append(
            f"the reference bf16 was converted from {', '.join(lossy)}. Errors of that conversion are not included."
        )
    return lines + [f"not possible: {reason}." for reason in report.impossible.values()]


def _ranking(cost: PrecisionCost) -> list[str]:
    ranking = cost.ranking
    if ranking is None:
        return ["-"] * len(_RANKING)
    return [
        f"{ranking.top1_kept:.3f}",
        f"{ranking.kendall_tau.mean:.4f}",
        f"{ranking.kendall_tau.p5:.4f}",
        f"{ranking.overlap_at_10:.3f}",
        f"{ranking.score_change:.5f}",
        f"{ranking.score_change_relative:.4f}",
    ]


def _spread(values: Distribution, form: str, worst: float) -> list[str]:
    numbers = (values.p1, values.p5, values.p50, values.mean, values.p95, values.p99, worst)
    return [format(number, form) for number in numbers]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
