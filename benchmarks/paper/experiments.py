"""The tables and figures of the EDJE paper, and how each of their rows is measured.

`published.toml` has the titles, the columns, the published values, and the model of
each row.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.numpy import load_file

from benchmarks import fetch
from benchmarks.paper.study import LOCAL, OUT, POOL, MissingDataError, Study, Variant
from benchmarks.peers import READER
from benchmarks.report import Report, select
from edje_index.bundles.info import JOINT_WEIGHTS
from edje_index.evaluation.recall import Estimate
from edje_index.evaluation.report import table
from storage_formats.atomic import write_bytes_atomic

Values: TypeAlias = Sequence[float | Estimate | None]
"""Measured values of a row, in the order of the columns. None is an unknown value.
Unknown values at the end can be left out.
"""
EXPERIMENTS: Mapping[str, Report] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text()
)
"""The experiments of `bench paper`, by name."""
OF_A_MODEL = ("zero-shot", "prior-art", "pool-size", "quantization")
"""The experiments in which a trained model can be measured without further training."""
_DIRECTIONS = ("t2i", "i2t")
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
# number of pairs, or of images, in a timed batch, as in the paper
_BATCH = 64


def run_experiments(names: Sequence[str], study: Study) -> dict[str, Report]:
    """Run experiments and write their tables to the folder of the study. Return the
    tables by name.
    """
    reports = {name: measured(EXPERIMENTS[name], study) for name in names}
    for name, report in reports.items():
        if not study.listing:
            text = "\n".join([*table_lines(report), ""])
            write_bytes_atomic(study.out / f"{name}.md", text.encode())
    return reports


def measured(experiment: Report, study: Study) -> Report:
    """Measure all rows of an experiment.

    Returns:
        The table as a JSON object. If a row cannot be measured because data are
        missing, the key `missing` of the row names these data. Of the rows that have a
        measurement, all have values if `state` is "complete", some if it is "partial",
        and none if it is "needs data".
    """
    columns = experiment["columns"]
    rows = []
    has_values = []
    for label, options in experiment["rows"].items():
        values: Values = ()
        missing = None
        arguments = dict(options)
        published = arguments.pop("paper")
        if "model" in arguments:
            variant = Variant(**arguments.pop("model"))
            try:
                values = _MEASURES[experiment["measure"]](study, variant, **arguments)
            except MissingDataError as error:
                missing = str(error)
            has_values.append(any(value is not None for value in values))
        own = dict(zip(columns, values, strict=False))
        estimates = {
            column: value
            for column, value in own.items()
            if isinstance(value, Estimate)
        }
        rows.append(
            {
                "label": label,
                "own": own | {name: each.value for name, each in estimates.items()},
                "intervals": {
                    name: each.bounds
                    for name, each in estimates.items()
                    if each.low is not None
                },
                "paper": {
                    column: value
                    for column, value in zip(columns, published, strict=False)
                    if not math.isnan(value)
                },
                "missing": missing,
            }
        )
    state = "needs data"
    if any(has_values):
        state = "complete" if all(has_values) else "partial"
    return {"notes": (), **experiment, "state": state, "rows": rows}


def table_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        f"## {report['title']}\n\n{report['source']}. Each cell: measured value"
        " [95 % interval] (published value).\n"
    )
    rows = report["rows"]
    lines = [
        [row["label"], *(_cell(row, column) for column in report["columns"])]
        for row in rows
    ]
    yield from table(("", *report["columns"]), lines)
    yield ""
    yield from (f"- {note}" for note in report["notes"])
    # Several rows can lack the same data. Only the first of these rows is named.
    missing = {row["missing"]: row["label"] for row in reversed(rows) if row["missing"]}
    yield from (
        f"- {label} was not measured: {text}" for text, label in missing.items()
    )


def _cell(row: Report, column: str) -> str:
    own = row["own"].get(column)
    text = "-"
    if own is not None:
        text = f"{own:,.1f}" if abs(own) >= 1 else f"{own:.3g}"
    if column in row["intervals"]:
        text += " [{:.1f}, {:.1f}]".format(*row["intervals"][column])
    if column in row["paper"]:
        text += f" ({row['paper'][column]:.4g})"
    return text


def _select(
    results: Sequence[Report],
    cutoffs: Sequence[int] = (1, 5, 10),
    pool: int | None = POOL,
    precision: str | None = "bf16",
) -> list[Estimate | None]:
    """Return the recalls in percent, first from text to image and then from image to
    text; None for a recall that `results` do not contain.

    `pool` and `precision` are None for the embeddings alone, without re-ranking.
    """
    wanted = (pool, precision)
    recalls = {
        result["direction"]: result["recall"]
        for result in results
        if (result.get("pool"), result.get("precision")) == wanted
    }
    return [
        Estimate(**recalls[direction][str(cutoff)]) if direction in recalls else None
        for direction in _DIRECTIONS
        for cutoff in cutoffs
    ]


def _recalls(
    study: Study,
    variant: Variant,
    pool: int = POOL,
    cutoffs: Sequence[int] = (1, 5, 10),
) -> Values:
    """Return the recalls on Flickr30k after the first training phase. If `pool` is 0,
    return the recalls of the embeddings alone.
    """
    if pool:
        results = study.results(study.trained(variant), "flickr", pool)
        return _select(results, cutoffs, pool)
    results = study.results(study.tower(variant.tower), "flickr", score="embedding")
    return _select(results, cutoffs, None, None)


def _first_hits(study: Study, variant: Variant, pool: int = POOL) -> Values:
    """Return R@1 of both directions, first on Flickr30k after the first training phase,
    then on COCO after the second phase. If `pool` is 0, return R@1 of the embeddings
    alone on Flickr30k.
    """
    flickr = _recalls(study, variant, pool, (1,))
    if not pool:
        return flickr
    coco = study.results(study.trained(variant, "finetune"), "coco")
    return [*flickr, *_select(coco, (1,))]


def _prior_art(study: Study, variant: Variant) -> Values:
    recalls = _first_hits(study, variant)
    tokens, width = _block_shape(study, variant)
    rows = _search(study, variant)
    vision = _vision_milliseconds(study, variant)
    # There is no report if commands are only listed.
    if not rows:
        return recalls
    # The last row of this batch size is that of the largest number of threads.
    *_, scored = (row for row in rows if row["case"].startswith(f"batch {_BATCH},"))
    milliseconds = _BATCH / scored["values"]["pairs/s"] * 1e3
    size = 2 * tokens * width / 1000
    weights = load_file(study.trained(variant) / JOINT_WEIGHTS).values()
    millions = sum(tensor.size for tensor in weights) / 1e6
    return [*recalls, size, millions, milliseconds, vision]


def _stages(study: Study, variant: Variant) -> Values:
    vision = _vision_milliseconds(study, variant)
    for row in select(_search(study, variant), table="one query"):
        names = ("text ms", "nearest ms", "fetch ms", "score ms")
        return [*(row["values"][name] for name in names), vision]
    return ()


def _search(study: Study, variant: Variant) -> list[Report]:
    bundle = study.trained(variant)
    index = study.build(bundle, "flickr")[0]
    command = f"bench search {index} --model {bundle} --pool {_BATCH}".split()
    only = ("--only", "rerank")
    rows: list[Report] = study.command("search", *command, *only)[1].get("rows", [])
    return rows


def _quantized(study: Study, variant: Variant, precision: str) -> Values:
    options = [word for name in _PRECISIONS for word in ("--precision", name)]
    results = study.results(study.trained(variant), "flickr", POOL, *options)
    sizes = (
        each["bytes_per_image"] / 1000
        for each in results
        if each.get("precision") == precision
    )
    recall = _select(results, (1,), POOL, precision)[0]
    return [recall, next(sizes, None)]


def _aligned(study: Study, variant: Variant) -> Values:
    local, compressed = (
        study.build(study.trained(each), "flickr")[0] for each in (LOCAL, Variant())
    )
    files, images, split = study.captions("flickr")
    options = ["--captions", files[0], "--images", images, "--against", compressed]
    options += ["--split", split] if split else []
    tokens, _ = _block_shape(study, variant)
    report = study.command(
        "explain", "explain", local, *options, "--out", f"{OUT}/explain.html"
    )[1]
    if not report:
        return ()
    alignment = report["alignment"]
    scores = alignment["first" if variant == LOCAL else "second"]
    effect = None if variant == LOCAL else alignment["test"]["effect_size"]
    return [tokens, scores["mean"], scores["deviation"], effect]


def _block_shape(study: Study, variant: Variant) -> list[Any]:
    shape: list[Any] = study.command("show", "info", study.trained(variant))[1].get(
        "block_shape", [None] * 2
    )
    return shape


def _words(study: Study, variant: Variant) -> Values:
    index = study.build(study.trained(variant), "flickr")[0]
    tokens, _ = _block_shape(study, variant)
    report = study.command("words", "explain", index, "--out", f"{OUT}/explain.html")[1]
    if not report:
        return ()
    words = report["words"]
    return [tokens, len(words["words"]), 100 * words["unused"] / words["tokens"]]


def _full(study: Study, variant: Variant, dataset: str) -> Values:
    phase = "pretrain" if dataset == "flickr" else "finetune"
    bundle = study.trained(variant, phase)
    results = study.results(bundle, dataset, 100, full=True)
    return _select(results, (5, 10, 20), 100)


def _fetch(study: Study, _variant: Variant) -> Values:
    make = f"bench make-synthetic {OUT}/random.edje --rows {fetch.PAPER.rows}"
    index = study.command("synthetic", *make.split())[0] / "random.edje"
    options = ["--pool", fetch.PAPER.pool]
    report = study.command("fetch", "bench", "fetch", index, *options)[1]
    rates = {
        row["table"]: row["values"].get("GB/s")
        for row in select(report.get("rows", []), subject=READER, case="cold")
    }
    contiguous = fetch.PAPER._replace(is_contiguous=True)
    return [rates.get(workload.title) for workload in (contiguous, fetch.PAPER)]


def _vision_milliseconds(study: Study, variant: Variant) -> float | None:
    """Return the milliseconds that the vision tower and the adapter take for 64 images.
    Return None if commands are only listed.
    """
    report = study.build(study.trained(variant), "flickr")[1]
    if not report:
        return None
    seconds = float(report["stage_seconds"]["encode"])
    return 1e3 * _BATCH * seconds / int(report["indexed"])


_MEASURES: Mapping[str, Callable[..., Values]] = {
    "prior_art": _prior_art,
    "recalls": _recalls,
    "first_hits": _first_hits,
    "quantized": _quantized,
    "aligned": _aligned,
    "words": _words,
    "full": _full,
    "fetch": _fetch,
    "stages": _stages,
}
