"""Writes the quantization report as a table, a Markdown page and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.quantization_report.distribution import Distribution
    from pipelines.jobs.quantization_report import PrecisionCost, QuantizeReport

PLOT = "quality.png"
_RANKING = ("top-1 kept", "Kendall tau", "tau p5", "overlap@10", "score change", "in std")
_DISTRIBUTION = ("p1", "p5", "p50", "mean", "p95", "p99", "worst")


def write_report(report: QuantizeReport, folder: Path) -> None:
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
    plot(report, folder / PLOT)


def table(report: QuantizeReport) -> list[str]:
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
    if report.queries is None:
        rows = [row[: -len(_RANKING)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(cells))
        for cells in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    return [*lines, "", *_circumstances(report)]


def markdown(report: QuantizeReport) -> list[str]:
    """Return the report as lines of Markdown."""
    m, d = report.block_shape
    lines = [f"# What each precision costs on {report.index}", ""]
    lines += [f"{report.rows:,} rows, blocks of {m} x {d}."]
    lines += [f"{line[0].upper()}{line[1:]}" for line in _circumstances(report)]
    lines += ["", f"![quality against size]({PLOT})", "", "## Size", ""]
    sizes = [[report.reference, f"{report.reference_bytes_per_image:,}", "1.00", "yes"]]
    for cost in report.precisions:
        share = cost.bytes_per_image / report.reference_bytes_per_image
        sizes.append(
            [cost.name, f"{cost.bytes_per_image:,}", f"{share:.2f}", "yes" if cost.stored else "no: encoded in memory"]
        )
    lines += _markdown_table(["precision", "bytes per image", f"of {report.reference}", "stored"], sizes)
    measured = [(cost.name, cost.tokens) for cost in report.precisions if cost.tokens is not None]
    lines += ["", f"## Relative error of a token, |token - {report.reference}| / |{report.reference}|", ""]
    errors = [[name, *_spread(tokens.relative_error, ".4g", worst_is_high=True)] for name, tokens in measured]
    lines += _markdown_table(["precision", *_DISTRIBUTION], errors)
    lines += ["", f"## Cosine similarity of a token with {report.reference}", ""]
    cosines = [[name, *_spread(tokens.cosine, ".6f", worst_is_high=False)] for name, tokens in measured]
    lines += _markdown_table(["precision", *_DISTRIBUTION], cosines)
    if report.queries is not None:
        lines += ["", f"## Re-ranking, against {report.reference}", ""]
        lines += _markdown_table(["precision", *_RANKING], [[cost.name, *_ranking(cost)] for cost in report.precisions])
        lines += [
            "",
            "Tau p5: 5 % quantile of Kendall's tau over the queries. Score change: mean absolute change of a score.",
            "In std: mean absolute change of a score, divided by the standard deviation of the query's scores.",
        ]
    return lines


def plot(report: QuantizeReport, path: Path) -> None:
    """Plot quality against kB per image, and write the plot to `path`.

    The quality is Kendall's tau if re-ranking was measured, otherwise the cosine similarity of the tokens.
    """
    from edje_index.evaluation.plots import COLOURS, label_points, new_figure, save_figure

    ranked = report.queries is not None
    costs = [cost for cost in report.precisions if (cost.ranking if ranked else cost.tokens) is not None]
    what = f"Kendall's tau against {report.reference}" if ranked else f"cosine of a token with {report.reference}"
    figure, axes = new_figure("Quality against size", "kB per image (log scale)", f"{what}: mean, p5 to p95")
    axes.set_xscale("log")
    points = [(report.reference_bytes_per_image / 1000, 1.0)]
    bars: list[tuple[float, float]] = []
    for cost in costs:
        spread = _quality(cost, ranked=ranked)
        points.append((cost.bytes_per_image / 1000, spread.mean))
        axes.plot([points[-1][0]] * 2, [spread.p5, spread.p95], color=COLOURS[5], linewidth=2, zorder=2)
        bars += [(points[-1][0], spread.p5 + (spread.p95 - spread.p5) * step / 20) for step in range(21)]
    axes.scatter([x for x, _ in points], [y for _, y in points], s=32, color=COLOURS[0], zorder=3)
    ticks = _apart(sorted(x for x, _ in points))
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.14, y=0.1)
    label_points(axes, points, [report.reference, *(cost.name for cost in costs)], avoid=bars)
    save_figure(figure, path)


def _quality(cost: PrecisionCost, *, ranked: bool) -> Distribution:
    if ranked:
        assert cost.ranking is not None
        return cost.ranking.kendall_tau
    assert cost.tokens is not None
    return cost.tokens.cosine


def _apart(ticks: Sequence[float]) -> list[float]:
    """Return `ticks` without those that are too close to the previous tick on a log scale."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick / kept[-1] > 1.15:
            kept.append(tick)
    return kept


def _circumstances(report: QuantizeReport) -> list[str]:
    """Return notes on the sample, the queries and the reference, one per line."""
    sample = report.sample
    left_out = f"; {sample.holes:,} of them are holes and were left out" if sample.holes else ""
    lines = [f"tokens: a sample of {sample.rows:,} rows, seed {sample.seed}{left_out}."]
    if report.queries is None:
        lines.append(f"re-ranking was not measured: {report.ranking_left_out}.")
    else:
        used = report.queries
        lines.append(f"re-ranking: {used.count:,} queries ({used.source}), {used.pool:,} candidates each.")
        if not used.trained:
            lines.append("the model is untrained: changes of the ranking have no meaning.")
    if report.reference != "bf16":
        lines.append(f"the reference is {report.reference}. Its own errors are not included.")
    elif lossy := [name for name in report.reference_encoded_from if name != "bf16"]:
        lines.append(
            f"the reference bf16 was converted from {', '.join(lossy)}. Errors of that conversion are not included."
        )
    lines += [f"not possible: {reason}." for reason in report.impossible.values()]
    return lines


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


def _spread(values: Distribution, form: str, *, worst_is_high: bool) -> list[str]:
    worst = values.highest if worst_is_high else values.lowest
    numbers = (values.p1, values.p5, values.p50, values.mean, values.p95, values.p99, worst)
    return [format(number, form) for number in numbers]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
