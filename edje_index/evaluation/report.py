"""An evaluation for people and programs: tables as plain text or Markdown, one JSON object, a folder with plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edje_index.evaluation.bootstrap import Estimate
from edje_index.evaluation.config import IMAGE_TO_TEXT, TEXT_TO_IMAGE
from edje_index.evaluation.figures import write_figures
from edje_index.evaluation.results import Evaluation, Result, System
from edje_index.scoring.weights import ScoreWeights
from storage_formats.errors import UsageError

NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """All figures as plain JSON values; recall in percent, cutoffs as strings."""
    value = asdict(evaluation)
    value["unit"] = "percent"
    value["results"] = [
        {name: _keyed(member) for name, member in result.items() if member is not None} for result in value["results"]
    ]
    return value


def text_report(evaluation: Evaluation) -> str:
    """For a terminal."""
    lines = [*_preface(evaluation)]
    for title, header, rows in _tables(evaluation):
        lines += ["", title, *_aligned([header, *rows])]
    return "\n".join([*lines, "", *_notes(evaluation)]).rstrip() + "\n"


def markdown_report(evaluation: Evaluation, figures: Sequence[str] = ()) -> str:
    """For a file; `figures` are names of images beside it."""
    lines = ["# Recall", "", *(f"- {line}" for line in _preface(evaluation))]
    for title, header, rows in _tables(evaluation):
        marks = ["---", "---", *["---:"] * (len(header) - 2)]
        lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in (header, marks, *rows))]
    lines += ["", *(f"- {line}" for line in _notes(evaluation))]
    for name in figures:
        lines += ["", f"![{Path(name).stem.replace('-', ' ')}]({name})"]
    return "\n".join(lines).rstrip() + "\n"


def write_report(evaluation: Evaluation, folder: str | Path) -> list[Path]:
    """Write `report.md`, `report.json` and plots into `folder`, which is made; returns what was written."""
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = write_figures(evaluation, out)
        (out / "report.json").write_text(json.dumps(to_json(evaluation), indent=2, sort_keys=True) + "\n")
        names = [path.name for path in figures]
        (out / "report.md").write_text(markdown_report(evaluation, names), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report into {out}: {error.strerror}") from error
    return [out / "report.md", out / "report.json", *figures]


def _keyed(member: Any) -> Any:
    """JSON has no integers for keys."""
    return {str(key): value for key, value in member.items()} if isinstance(member, dict) else member


def _preface(evaluation: Evaluation) -> list[str]:
    inputs = evaluation.inputs
    split = f", split {evaluation.split}" if evaluation.split else ""
    missing = ", ".join(f"{reason} {count:,}" for reason, count in inputs.missing.items())
    lines = [
        f"captions {evaluation.captions}{split}: {inputs.images:,} images with {inputs.captions:,} captions",
        f"used {inputs.used:,} images with {inputs.captions_used:,} captions, "
        f"missing {inputs.images - inputs.used:,} images{f' ({missing})' if missing else ''}",
    ]
    if evaluation.protocol == "full":
        lines.append("full protocol: all indexed images, and the captions of all splits, may be answered")
    return lines + [_described(system) for system in evaluation.systems]


def _described(system: System) -> str:
    m, d = system.block_shape
    untrained = "" if system.trained else ", untrained: its figures are those of chance"
    weights, others = ScoreWeights(**system.weights), ScoreWeights(**system.caption_weights)
    score = f", score = {weights.described()}" if any(weights[:-1]) else ""
    if others != weights:
        score += f", of captions {others.described()}"
    rounded = "" if system.dtype in (None, "float32") else f", logits in {system.dtype}"
    return f"{system.name}: {m} x {d} tokens, bundle {system.fingerprint[:12]}{score}{rounded}{untrained}"


def _tables(evaluation: Evaluation) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each direction."""
    cutoffs = evaluation.cutoffs
    header = ["index", "tokens", "kB an image", "pool", *(f"R@{k}" for k in cutoffs)]
    if evaluation.pools:
        header += ["in pool", f"gain R@{cutoffs[0]}", f"change R@{cutoffs[0]}"]
    tables = []
    for direction in dict.fromkeys(result.direction for result in evaluation.results):
        systems = [system for system in evaluation.systems if direction in system.queries]
        queries = " / ".join(dict.fromkeys(f"{system.queries[direction]:,}" for system in systems))
        candidates = " / ".join(dict.fromkeys(f"{system.candidates[direction]:,}" for system in systems))
        title = f"{NAMES[direction]}: {queries} queries, {candidates} {_CANDIDATES[direction]}"
        results = [result for result in evaluation.results if result.direction == direction]
        tables.append((title, header, [_row(evaluation, result) for result in results]))
    return tables


def _row(evaluation: Evaluation, result: Result) -> list[str]:
    first = evaluation.cutoffs[0]
    recall = [_shown(result.recall[k]) for k in evaluation.cutoffs]
    if result.precision is None:
        return [result.system, "embedding only", "-", "-", *recall, *(["-"] * 3 if evaluation.pools else [])]
    name = result.precision + ("*" if result.simulated_from else "")
    assert result.bytes_per_image is not None
    assert result.gain is not None
    return [
        result.system,
        name,
        f"{result.bytes_per_image / 1000:.3g}",
        str(result.pool),
        *recall,
        "-" if result.in_pool is None else f"{result.in_pool.value:.1f}",
        _shown(result.gain[first], "{:+.1f}"),
        "-" if result.change is None else _shown(result.change[first], "{:+.2f}"),
    ]


def _shown(estimate: Estimate, number: str = "{:.1f}") -> str:
    text = number.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{number.format(estimate.low)}, {number.format(estimate.high)}]"


def _notes(evaluation: Evaluation) -> list[str]:
    notes = ["R@k: percent of queries with a right answer among the first k."]
    if evaluation.resamples:
        notes.append(
            f"In brackets: 95 % interval, {evaluation.resamples:,} bootstrap resamples of images, "
            f"seed {evaluation.seed}; differences are paired."
        )
    if evaluation.pools:
        others = sorted({result.change_from for result in evaluation.results if result.change_from})
        notes.append("In pool: percent whose right answer the embeddings put into the pool. Gain: over embedding only.")
        notes += [f"Change: from {name} at the same pool." for name in others]
    simulated = {f"{each.precision} from {each.simulated_from}" for each in evaluation.results if each.simulated_from}
    if simulated:
        made = ", ".join(sorted(simulated))
        notes.append(f"* not stored in the index: tokens were encoded and decoded in memory ({made}).")
    if evaluation.pairs:
        notes.append(f"{evaluation.pairs:,} scores of pairs, {evaluation.seconds:.0f} s in all.")
    return notes


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
