"""Writes evaluation reports as plain text, Markdown, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edje_index.evaluation.bootstrap import Estimate
from edje_index.evaluation.plots import write_figures
from edje_index.evaluation.results import Evaluation, Result, System
from edje_index.scoring.weights import IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights
from storage_formats.errors import UsageError

NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return the evaluation as plain JSON values. Recall is in percent."""
    value = asdict(evaluation)
    value["unit"] = "percent"
    value["results"] = [
        {name: _keyed(member) for name, member in result.items() if member is not None} for result in value["results"]
    ]
    return value


def text_report(evaluation: Evaluation) -> str:
    """Return the evaluation as plain text."""
    lines = [*_preface(evaluation)]
    for title, header, rows in _tables(evaluation):
        lines += ["", title, *_aligned([header, *rows])]
    return "\n".join([*lines, "", *_notes(evaluation)]).rstrip() + "\n"


def markdown_report(evaluation: Evaluation, figures: Sequence[str] = ()) -> str:
    """Return the evaluation as Markdown. `figures` are the file names of plots to include."""
    lines = ["# Recall", "", *(f"- {line}" for line in _preface(evaluation))]
    for title, header, rows in _tables(evaluation):
        marks = ["---", "---", *["---:"] * (len(header) - 2)]
        lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in (header, marks, *rows))]
    lines += ["", *(f"- {line}" for line in _notes(evaluation))]
    for name in figures:
        lines += ["", f"![{Path(name).stem.replace('-', ' ')}]({name})"]
    return "\n".join(lines).rstrip() + "\n"


def write_report(evaluation: Evaluation, folder: str | Path) -> list[Path]:
    """Write `report.md`, `report.json` and plots to the directory `folder`. Return the paths of all files.

    Raises:
        UsageError: the files cannot be written.
    """
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = write_figures(evaluation, out)
        (out / "report.json").write_text(json.dumps(to_json(evaluation), indent=2, sort_keys=True) + "\n")
        names = [path.name for path in figures]
        (out / "report.md").write_text(markdown_report(evaluation, names), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report into {out}: {error.strerror}; choose another directory") from error
    return [out / "report.md", out / "report.json", *figures]


def _keyed(member: Any) -> Any:
    """Convert the keys of a dictionary to strings, as in JSON. Return any other value unchanged."""
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
        lines.append("full-dataset protocol: candidates are all images of the index and the captions of all splits")
    if evaluation.joint_pool is not None:
        lines.append(f"the joint encoder scores the best {evaluation.joint_pool:,} candidates of each query")
    return lines + [_described(system) for system in evaluation.systems]


def _described(system: System) -> str:
    m, d = system.block_shape
    untrained = "" if system.trained else ", untrained: expect the recall of a random order"
    rounded = "" if system.dtype in (None, "float32") else f", logits in {system.dtype}"
    return f"{system.name}: {m} x {d} tokens, bundle {system.fingerprint[:12]}{_score(system)}{rounded}{untrained}"


def _score(system: System) -> str:
    """Describe the final score in words. Return "" if the final score is the logit alone."""
    scores = {direction: ScoreWeights.from_json(weights) for direction, weights in system.weights.items()}
    terms = {direction: weights.described() for direction, weights in scores.items()}
    distinct = set(terms.values())
    if distinct <= {ScoreWeights().described()}:
        return ""
    if len(distinct) == 1:
        return f", score = {distinct.pop()}"
    return "".join(f", {NAMES[direction].lower()} score = {text}" for direction, text in terms.items())


def _tables(evaluation: Evaluation) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, header, rows) of each table. There is one table per direction."""
    cutoffs = evaluation.cutoffs
    header = ["index", "tokens", "kB per image", "pool", *(f"R@{k}" for k in cutoffs)]
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
    notes = ["R@k: percentage of queries with a relevant candidate among the first k."]
    if evaluation.resamples:
        notes.append(
            f"In brackets: 95 % confidence interval from {evaluation.resamples:,} bootstrap resamples of images, "
            f"seed {evaluation.seed}. Differences are paired."
        )
    if evaluation.pools:
        references = sorted({result.change_from for result in evaluation.results if result.change_from})
        notes.append(
            "In pool: percentage of queries with a relevant candidate in the pool. "
            "Gain: R@k minus R@k of embedding only."
        )
        notes += [f"Change: R@k minus R@k of {name} with the same pool." for name in references]
    simulated = {f"{each.precision} from {each.simulated_from}" for each in evaluation.results if each.simulated_from}
    if simulated:
        notes.append(f"* not stored in the index, converted in memory: {', '.join(sorted(simulated))}.")
    if evaluation.pairs:
        notes.append(f"{evaluation.pairs:,} pairs scored, {evaluation.seconds:.0f} s in total.")
    return notes


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
