"""Writes reports of evaluations and of precisions as JSON and Markdown. The Markdown
tables are aligned, so they are also readable in a terminal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.evaluation.recall import Estimate
from edje_index.scoring.weights import IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights
from storage_formats.atomic import Json
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.evaluate import Evaluation
    from edje_index.evaluation.quantization import QuantizationReport

_NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}
_NOTES = """
- R@k: percentage of queries with a relevant candidate among the first k. In brackets:
  95 % confidence interval from bootstrap resamples of images; differences are paired.
- In pool: percentage of queries with a relevant candidate in the pool.
- Gain: R@k minus R@k of embedding only. Change: R@k minus R@k of the reference, bf16 or
  else the most accurate precision, with the same pool.
- *: not stored in the index, converted in memory.
"""


def check_report_folder(folder: Path) -> None:
    """Create the directory `folder` if it is missing, and check that a report can be
    written to it.

    Raises:
        UsageError: no report can be written to `folder`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".report-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write the report to {folder}: {error.strerror}; choose another"
        " directory"
    )


def write_report(
    folder: Path, markdown: str, value: Json, name: str = "report"
) -> None:
    """Write `<name>.md` and `<name>.json` to the directory `folder`. A missing
    directory is created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(
            markdown, encoding="utf-8", errors="backslashreplace"
        )
        (folder / f"{name}.json").write_text(
            json.dumps(value, indent=2, sort_keys=True, default=str) + "\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise _cannot_write(folder, error) from error


def evaluation_report(evaluation: Evaluation) -> str:
    """Return an evaluation as Markdown."""
    inputs = evaluation.inputs
    system = evaluation.system
    cutoffs = evaluation.cutoffs
    split = f", split {evaluation.split}" if evaluation.split else ""
    missing = "".join(
        f", {reason} {count:,}" for reason, count in inputs.missing.items()
    )
    preface = [
        f"captions {evaluation.captions}{split}: {inputs.images:,} images with"
        f" {inputs.captions:,} captions, {evaluation.protocol} protocol",
        f"used {inputs.used:,} images with {inputs.captions_used:,} captions,"
        f" missing {inputs.images - inputs.used:,} images{missing}",
    ]
    m, d = system.block_shape
    preface.append(
        f"{system.name}: {m} x {d} tokens, bundle {system.fingerprint[:12]}, logits in"
        f" {system.dtype}{'' if system.trained else ', untrained'}"
    )
    preface += [
        f"{_NAMES[name]} score: {ScoreWeights.from_json(weights).described()}"
        for name, weights in system.weights.items()
    ]
    lines = ["# Recall", "", *(f"- {line}" for line in preface)]

    header = ["tokens", "kB per image", "pool", *(f"R@{k}" for k in cutoffs)]
    if evaluation.pools:
        header += ["in pool", f"gain R@{cutoffs[0]}", f"change R@{cutoffs[0]}"]
    for direction, queries in system.queries.items():
        rows = []
        for result in evaluation.results:
            if result.direction != direction:
                continue
            name = "embedding only"
            size = "-"
            if result.precision is not None:
                name = result.precision + ("*" if result.simulated_from else "")
                size = f"{(result.bytes_per_image or 0) / 1000:.3g}"
            row = [name, size, str(result.pool or "-")]
            row += [_shown(result.recall[k]) for k in cutoffs]
            if result.in_pool is not None:
                row.append(f"{result.in_pool.value:.1f}")
            if result.gain is not None:
                row.append(_shown(result.gain[cutoffs[0]], "{:+.1f}"))
            if result.change is not None:
                row.append(_shown(result.change[cutoffs[0]], "{:+.2f}"))
            rows.append(row + ["-"] * (len(header) - len(row)))
        candidates = f"{system.candidates[direction]:,} {_CANDIDATES[direction]}"
        lines += [
            "",
            f"## {_NAMES[direction]}: {queries:,} queries, {candidates}",
            "",
            *table(header, rows),
        ]

    return "\n".join(lines) + "\n" + _NOTES


def _shown(estimate: Estimate, number: str = "{:.1f}") -> str:
    text = number.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{number.format(estimate.low)}, {number.format(estimate.high)}]"


def quantization_report(report: QuantizationReport) -> str:
    """Return the comparison of precisions as Markdown. If the report has an `advice`,
    the first line is this sentence.
    """
    m, d = report.block_shape
    holes = f"; {report.holes:,} of them are holes" if report.holes else ""
    notes = [
        f"{report.rows:,} rows, blocks of {m} x {d}.",
        f"Tokens: a sample of {report.sampled_rows:,} rows{holes}.",
    ]
    if not report.queries:
        notes.append(f"Re-ranking was not measured: {report.ranking_left_out}.")
    else:
        source = f"{report.queries:,} queries ({report.query_source})"
        notes.append(f"Re-ranking: {source}, {report.pool:,} candidates each.")
        if not report.trained:
            notes.append(
                "The model is untrained: changes of the ranking have no meaning."
            )
    for score, estimate in report.recall.items():
        notes.append(f"R@1 of {report.reference} by {score}: {_shown(estimate)} %.")
    if report.reference != "bf16":
        notes.append(
            f"The reference is {report.reference}. Its own errors are not included."
        )
    elif lossy := [name for name in report.reference_encoded_from if name != "bf16"]:
        origin = ", ".join(lossy)
        notes.append(
            f"The reference bf16 was converted from {origin}. Errors of that conversion"
            " are not included."
        )
    sentence = [] if report.advice is None else [f"**{report.advice}**", ""]
    lines = [
        *sentence,
        f"# What each precision costs on {report.index}",
        "",
        *(f"- {note}" for note in notes),
        "",
    ]
    sizes = [(report.reference, report.reference_bytes_per_image, "0", "yes")]
    rankings = []
    for cost in report.precisions:
        error = "" if cost.relative_error is None else f"{cost.relative_error:.4f}"
        stored = "yes" if cost.stored else "no"
        sizes.append((cost.name, cost.bytes_per_image, error, stored))
        for score, change in cost.ranking.items():
            loss = "" if change.loss is None else _shown(change.loss)
            rankings.append([cost.name, score, _shown(change.first_kept), loss])
    names = ("bits per value", "bytes per image", "relative error", "stored")
    lines += table(
        ("precision", *names),
        [
            [name, f"{8 * size / (m * d):.2f}", f"{size:,}", *others]
            for name, size, *others in sizes
        ],
    )
    if rankings:
        header = ("precision", "ranking by", "first hit kept, %", "R@1 loss, points")
        lines += ["", *table(header, rankings)]
    return "\n".join(lines) + "\n"


def quantization_figure(report: QuantizationReport) -> str:
    """Return an SVG image that plots the loss of each precision against its bytes per
    image. The loss is measured on the ranking by the whole score, in points of R@1. If
    the correct hits are not known, it is the percentage of first hits that change.
    """
    losses = {report.reference: (report.reference_bytes_per_image, Estimate(0.0))}
    for cost in report.precisions:
        # The first entry is for the whole score. If re-ranking was not measured, there
        # are no entries, and the precision is not plotted.
        for change in list(cost.ranking.values())[:1]:
            losses[cost.name] = (cost.bytes_per_image, change.lost)
    points = [
        (size, lost, f"{name}: {lost.value:.1f} at {size / 1000:.1f} kB", "#06c")
        for name, (size, lost) in losses.items()
    ]
    loss = "R@1 loss, points" if report.recall else "First hits that change, %"
    return scatter_plot(f"{loss}, over bytes per image (logarithmic)", points)


def scatter_plot(title: str, points: Sequence[tuple[float, Estimate, str, str]]) -> str:
    """Return an SVG image with a labelled circle for each of `points`: (x, y, label,
    colour).

    The scale of x is logarithmic. A vertical line through a circle shows the confidence
    interval of y. Horizontal grid lines are at both ends of the scale of y, and at 0 if
    0 is between them.
    """
    across = [math.log(x) for x, *_ in points]
    heights = [each for _, y, *_ in points for each in y.bounds]
    left = min(across)
    top = max(heights)
    bottom = min(heights)
    width = max(across) - left or 1.0
    height = top - bottom or 1.0
    marks = []
    for level in sorted({bottom, min(max(0.0, bottom), top), top}):
        down = 60 + 300 * (top - level) / height
        marks.append(
            f'<path d="M40 {down:.1f}H700" stroke="#ddd"/>'
            f'<text x="34" y="{down + 4:.1f}" text-anchor="end">{level:.1f}</text>'
        )
    for at, (_, y, label, colour) in zip(across, points, strict=True):
        x = 60 + 440 * (at - left) / width
        down, low, high = (
            60 + 300 * (top - each) / height for each in (y.value, *y.bounds)
        )
        marks.append(
            f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="#888"/>'
            f'<circle cx="{x:.1f}" cy="{down:.1f}" r="4" fill="{colour}"'
            ' stroke="black"/>'
            f'<text x="{x + 8:.1f}" y="{down - 6:.1f}">{label}</text>'
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-size="11"'
        ' font-family="sans-serif"><rect width="720" height="400" fill="#fff"/>'
        f'<text x="8" y="20">{title}</text>{"".join(marks)}</svg>\n'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. The first column is aligned to the left,
    and all other columns to the right.
    """
    rows = list(rows)
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [
        "| "
        + " | ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (header, marks, *rows)
    ]
