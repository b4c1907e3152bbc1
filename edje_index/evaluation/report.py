"""Writes reports of evaluations and of precisions as JSON and Markdown, whose
tables are aligned for a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edje_index.scoring.weights import IMAGE_TO_TEXT, TEXT_TO_IMAGE, ScoreWeights
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.evaluation.evaluate import Evaluation
    from edje_index.evaluation.quantization import Distribution, QuantizationReport
    from edje_index.evaluation.recall import Estimate

_NAMES = {TEXT_TO_IMAGE: "Text-to-image", IMAGE_TO_TEXT: "Image-to-text"}
_CANDIDATES = {TEXT_TO_IMAGE: "images", IMAGE_TO_TEXT: "captions"}
_RANKING = (
    "top-1 kept",
    "Kendall tau",
    "tau p5",
    "overlap@10",
    "score change",
    "in std",
)
_DISTRIBUTION = ("p1", "p5", "p50", "mean", "p95", "p99", "worst")


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
        raise UsageError(
            f"cannot write the report to {folder}: {error.strerror}; choose another"
            " directory"
        ) from error


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
    """Return the comparison of precisions as Markdown."""
    m, d = report.block_shape
    left_out = (
        f"; {report.holes:,} of them are holes and were left out"
        if report.holes
        else ""
    )
    notes = [
        f"{report.rows:,} rows, blocks of {m} x {d}.",
        f"Tokens: a sample of {report.sampled_rows:,} rows{left_out}.",
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
    notes += [f"Not possible: {reason}." for reason in report.impossible.values()]
    lines = [
        f"# What each precision costs on {report.index}",
        "",
        *(f"- {note}" for note in notes),
    ]

    sizes = [[report.reference, f"{report.reference_bytes_per_image:,}", "1.00", "yes"]]
    errors = []
    cosines = []
    rankings = []
    for cost in report.precisions:
        share = cost.bytes_per_image / report.reference_bytes_per_image
        stored = "yes" if cost.stored else "no: encoded in memory"
        sizes.append([cost.name, f"{cost.bytes_per_image:,}", f"{share:.2f}", stored])
        if (error := cost.relative_error) is not None and (
            cosine := cost.cosine
        ) is not None:
            errors.append([cost.name, *_spread(error, ".4g", error.highest)])
            cosines.append([cost.name, *_spread(cosine, ".6f", cosine.lowest)])
        if (ranking := cost.ranking) is not None:
            taus = [f"{ranking.kendall_tau.mean:.4f}", f"{ranking.kendall_tau.p5:.4f}"]
            changes = [
                f"{ranking.score_change:.5f}",
                f"{ranking.score_change_relative:.4f}",
            ]
            overlap = f"{ranking.overlap_at_10:.3f}"
            rankings.append(
                [cost.name, f"{ranking.top1_kept:.3f}", *taus, overlap, *changes]
            )
    name = report.reference
    lines += [
        "",
        "## Size",
        "",
        *_table(("precision", "bytes per image", f"of {name}", "stored"), sizes),
    ]
    lines += ["", f"## Relative error of a token, |token - {name}| / |{name}|", ""]
    lines += _table(("precision", *_DISTRIBUTION), errors)
    lines += [
        "",
        f"## Cosine similarity of a token with {name}",
        "",
        *_table(("precision", *_DISTRIBUTION), cosines),
    ]
    if rankings:
        lines += [
            "",
            f"## Re-ranking, against {name}",
            "",
            *_table(("precision", *_RANKING), rankings),
            "",
        ]
        lines.append(
            "Tau p5: 5 % quantile of Kendall's tau over the queries. Score change: mean"
            " absolute change of a score.\nIn std: mean absolute change of a score,"
            " divided by the standard deviation of the query's scores."
        )
    return "\n".join(lines) + "\n"


def _spread(values: Distribution, form: str, worst: float) -> list[str]:
    numbers = (
        values.p1,
        values.p5,
        values.p50,
        values.mean,
        values.p95,
        values.p99,
        worst,
    )
    return [format(number, form) for number in numbers]


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
