"""Writes reports of evaluations as JSON and Markdown. The Markdown tables are aligned,
so they are also readable in a terminal.
"""

from __future__ import annotations

import json
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

_NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}
_NOTES = """
- R@k: percentage of queries with a relevant candidate among the first k. In brackets:
  95 % confidence interval from bootstrap resamples of images; differences are paired.
- In pool: percentage of queries with a relevant candidate in the pool.
- Gain: R@k minus R@k of embedding only. Change: R@k minus R@k of the reference, the
  most accurate stored precision, with the same pool.
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
    cutoffs = evaluation.cutoffs
    split = f", split {evaluation.split}" if evaluation.split else ""
    missing = "".join(
        f", {reason} {count:,}" for reason, count in inputs["missing"].items()
    )
    preface = [
        f"captions {evaluation.captions}{split}: {inputs['images']:,} images with"
        f" {inputs['captions']:,} captions, {evaluation.protocol} protocol",
        f"used {inputs['used']:,} images with {inputs['captions_used']:,} captions,"
        f" missing {inputs['images'] - inputs['used']:,} images{missing}",
    ]
    m, d = evaluation.block_shape
    preface.append(
        f"{evaluation.name}: {m} x {d} tokens, bundle {evaluation.fingerprint[:12]},"
        f" logits in {evaluation.dtype}{'' if evaluation.trained else ', untrained'}"
    )
    preface += [
        f"{_NAMES[name]} score: {ScoreWeights.from_json(weights).described()}"
        for name, weights in evaluation.weights.items()
    ]
    advice = [f"**{evaluation.advice}**", ""] if evaluation.advice else []
    lines = ["# Recall", "", *advice, *(f"- {line}" for line in preface)]

    header = ["tokens", "kB per image", "pool", *(f"R@{k}" for k in cutoffs)]
    if evaluation.pools:
        header += ["in pool", f"gain R@{cutoffs[0]}", f"change R@{cutoffs[0]}"]
    is_comparison = any(result.change for result in evaluation.results)
    for direction, queries in evaluation.queries.items():
        rows = []
        for result in evaluation.results:
            if result.direction != direction:
                continue
            name = "embedding only"
            size = "-"
            if result.precision is not None:
                name = result.precision + ("*" if result.simulated_from else "")
                if is_comparison and result.change is None:
                    name += " (reference)"
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
        candidates = f"{evaluation.candidates[direction]:,} {_CANDIDATES[direction]}"
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
