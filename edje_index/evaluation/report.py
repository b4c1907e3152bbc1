"""Writes reports of evaluations and of precisions as JSON and Markdown, whose
tables are aligned for a terminal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edje_index.scoring.weights import IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.evaluate import Evaluation
    from edje_index.evaluation.quantization import QuantizationReport
    from edje_index.evaluation.recall import Estimate

_NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}


def check_report_folder(folder: Path) -> None:
    """Create the directory `folder` for a report if it is missing.

    Raises:
        UsageError: no report can be written there.
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
    folder: Path, markdown: str, value: dict[str, Any], name: str = "report"
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
    missing = ", ".join(
        f"{reason} {count:,}" for reason, count in inputs.missing.items()
    )
    preface = [
        (
            f"captions {evaluation.captions}{split}: {inputs.images:,} images with"
            f" {inputs.captions:,} captions"
        ),
        (
            f"used {inputs.used:,} images with {inputs.captions_used:,} captions,"
            f" missing {inputs.images - inputs.used:,}"
            f" images{f' ({missing})' if missing else ''}"
        ),
    ]
    if evaluation.protocol == "full":
        preface.append(
            "full-dataset protocol: candidates are all images of the index and the"
            " captions of all splits"
        )
    m, d = system.block_shape
    scores = {
        direction: ScoreWeights.from_json(weights)
        for direction, weights in system.weights.items()
    }
    preface.append(
        f"{system.name}: {m} x {d} tokens, bundle {system.fingerprint[:12]}"
        + "".join(
            f", {_NAMES[name].lower()} score = {weights.described()}"
            for name, weights in scores.items()
        )
        + ("" if system.dtype == "float32" else f", logits in {system.dtype}")
        + ("" if system.trained else ", untrained: expect the recall of a random order")
    )
    lines = ["# Recall", "", *(f"- {line}" for line in preface)]

    header = ["tokens", "kB per image", "pool", *(f"R@{k}" for k in cutoffs)]
    if evaluation.pools:
        header += ["in pool", f"gain R@{cutoffs[0]}", f"change R@{cutoffs[0]}"]
    for direction, queries in system.queries.items():
        rows = []
        for result in evaluation.results:
            if result.direction != direction:
                continue
            recall = [_shown(result.recall[k]) for k in cutoffs]
            if result.precision is None:
                rows.append(
                    [
                        "embedding only",
                        "-",
                        "-",
                        *recall,
                        *(["-"] * 3 if evaluation.pools else []),
                    ]
                )
                continue
            assert result.bytes_per_image is not None
            assert result.gain is not None
            rows.append(
                [
                    result.precision + ("*" if result.simulated_from else ""),
                    f"{result.bytes_per_image / 1000:.3g}",
                    str(result.pool),
                    *recall,
                    "-" if result.in_pool is None else f"{result.in_pool.value:.1f}",
                    _shown(result.gain[cutoffs[0]], "{:+.1f}"),
                    (
                        "-"
                        if result.change is None
                        else _shown(result.change[cutoffs[0]], "{:+.2f}")
                    ),
                ]
            )
        candidates = f"{system.candidates[direction]:,} {_CANDIDATES[direction]}"
        lines += [
            "",
            f"## {_NAMES[direction]}: {queries:,} queries, {candidates}",
            "",
            *_table(header, rows),
        ]

    notes = ["R@k: percentage of queries with a relevant candidate among the first k."]
    if evaluation.resamples:
        notes.append(
            f"In brackets: 95 % confidence interval from {evaluation.resamples:,}"
            f" bootstrap resamples of images, seed {evaluation.seed}. Differences are"
            " paired."
        )
    if evaluation.pools:
        notes.append(
            "In pool: percentage of queries with a relevant candidate in the pool. "
            "Gain: R@k minus R@k of embedding only."
        )
        references = sorted(
            {result.change_from for result in evaluation.results if result.change_from}
        )
        notes += [
            f"Change: R@k minus R@k of {name} with the same pool."
            for name in references
        ]
    simulated = {
        f"{each.precision} from {each.simulated_from}"
        for each in evaluation.results
        if each.simulated_from
    }
    if simulated:
        notes.append(
            "* not stored in the index, converted in memory:"
            f" {', '.join(sorted(simulated))}."
        )
    if evaluation.pairs:
        notes.append(
            f"{evaluation.pairs:,} pairs scored, {evaluation.seconds:.0f} s in total."
        )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _shown(estimate: Estimate, number: str = "{:.1f}") -> str:
    text = number.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{number.format(estimate.low)}, {number.format(estimate.high)}]"


def quantization_report(report: QuantizationReport) -> str:
    """Return the comparison of precisions as Markdown. The first line is the advice."""
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
    sizes = [[report.reference, f"{report.reference_bytes_per_image:,}", "0", "yes"]]
    rankings = []
    for cost in report.precisions:
        error = "" if cost.relative_error is None else f"{cost.relative_error:.4f}"
        stored = "yes" if cost.stored else "no"
        sizes.append([cost.name, f"{cost.bytes_per_image:,}", error, stored])
        for score, change in cost.ranking.items():
            loss = "" if change.loss is None else _shown(change.loss)
            rankings.append([cost.name, score, _shown(change.first_kept), loss])
    lines += _table(("precision", "bytes per image", "relative error", "stored"), sizes)
    if rankings:
        header = ("precision", "ranking by", "first hit kept, %", "R@1 loss, points")
        lines += ["", *_table(header, rankings)]
    return "\n".join(lines) + "\n"


def quantization_figure(report: QuantizationReport) -> str:
    """Return the loss of each precision against its bytes per image, on a logarithmic
    scale, as an SVG image. The loss is that of the whole score: points of R@1, or the
    percentage of first hits that change.
    """
    from edje_index.evaluation.quantization import loss_of

    points = [(report.reference, report.reference_bytes_per_image, 0.0, 0.0, 0.0)]
    for cost in report.precisions:
        for change in list(cost.ranking.values())[:1]:
            lost = loss_of(change)
            low = lost.value if lost.low is None else lost.low
            high = lost.value if lost.high is None else lost.high
            points.append((cost.name, cost.bytes_per_image, lost.value, low, high))
    top = max(1.0, *(point[4] for point in points))
    bottom = min(0.0, *(point[3] for point in points))
    sizes = [math.log2(point[1]) for point in points]
    spread = max(sizes) - min(sizes) or 1.0
    marks = []
    for (name, size, value, low, high), position in zip(points, sizes, strict=True):
        x = 70 + 480 * (position - min(sizes)) / spread
        y, y_low, y_high = (
            40 + 220 * (top - each) / (top - bottom) for each in (value, low, high)
        )
        marks.append(
            f'<path d="M{x:.0f} {y_low:.0f}V{y_high:.0f}" stroke="#888"/>'
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="#06c"/>'
            f'<text x="{x:.0f}" y="285">{size / 1000:.1f} kB</text>'
            f'<text x="{x:.0f}" y="{y - 10:.0f}">{name} {value:.1f}</text>'
        )
    is_recall = bool(report.recall)
    title = "R@1 loss, points" if is_recall else "First hits that change, %"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 300" font-size="12"'
        ' font-family="sans-serif" text-anchor="middle">'
        '<rect width="620" height="300" fill="#fff"/>'
        f'<text x="310" y="20">{title}, against bytes per image</text>'
        f"{''.join(marks)}</svg>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. All columns but the first are aligned
    to the right.
    """
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
