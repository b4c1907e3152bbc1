"""The tables and figures of the EDJE paper, and how each of their rows is measured.

`published.toml` has the titles, the columns and the published values.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.fetch import bench
from benchmarks.fetch.peers import READER
from benchmarks.paper.study import (
    LANGUAGES,
    LOCAL,
    MAIN_TOWER,
    OUT,
    POOL,
    TOWERS,
    MissingDataError,
    Study,
    Variant,
)
from benchmarks.report import Report
from edje_index.evaluation.recall import Estimate
from edje_index.evaluation.report import scatter_plot, table
from storage_formats.atomic import write_bytes_atomic

Values: TypeAlias = Sequence[float | Estimate | None]
"""Measured values of a row, in the order of the columns. None is an unknown value.
Unknown values at the end can be left out.
"""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the EDJE paper.

    Attributes:
        source: table, figure or section of the EDJE paper.
        rows: published values of each row, by label. NaN stands for a value that the
            paper does not give.
        measurements: how a row is measured, by label: a function and its arguments,
            called as `function(study, *arguments)`. Rows without an entry show only
            published values.
    """

    title: str
    source: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]
    measurements: Mapping[str, tuple[Callable[..., Values], *tuple[Any, ...]]]
    notes: Sequence[str] = ()


def run_experiments(names: Sequence[str], study: Study) -> dict[str, Report]:
    """Run experiments and write their tables to the folder of the study. Return the
    tables by name.
    """
    reports = {name: measured(EXPERIMENTS[name], study) for name in names}
    if not study.listing:
        for name, report in reports.items():
            text = "\n".join([*report_lines(report), ""])
            write_bytes_atomic(study.out / f"{name}.md", text.encode())
        if "prior-art" in reports:
            figure = prior_art_figure(reports["prior-art"]["rows"])
            write_bytes_atomic(study.out / FIGURE, figure.encode())
    return reports


def measured(experiment: Experiment, study: Study) -> Report:
    """Measure all rows of an experiment.

    Returns:
        The table as a JSON object. If a row cannot be measured because data are
        missing, the key `missing` of the row names these data. Of the rows that have a
        measurement, all have values if `state` is "complete", some if it is "partial",
        and none if it is "needs data".
    """
    rows = []
    has_values = []
    for label, published in experiment.rows.items():
        values: Values = ()
        missing = None
        if label in experiment.measurements:
            function, *arguments = experiment.measurements[label]
            try:
                values = function(study, *arguments)
            except MissingDataError as error:
                missing = str(error)
            has_values.append(any(value is not None for value in values))
        paper = {
            column: value
            for column, value in zip(experiment.columns, published, strict=False)
            if not math.isnan(value)
        }
        own: dict[str, float | None] = {}
        intervals = {}
        for column, value in zip(experiment.columns, values, strict=False):
            if isinstance(value, Estimate):
                own[column] = value.value
                if value.low is not None:
                    intervals[column] = value.bounds
            else:
                own[column] = value
        rows.append(
            {
                "label": label,
                "own": own,
                "intervals": intervals,
                "paper": paper,
                "missing": missing,
            }
        )
    state = "needs data"
    if any(has_values):
        state = "complete" if all(has_values) else "partial"
    return {
        "title": experiment.title,
        "source": experiment.source,
        "columns": experiment.columns,
        "state": state,
        "rows": rows,
        "notes": experiment.notes,
    }


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        f"## {report['title']}\n\n{report['source']}. Each cell: measured value"
        " [95 % interval] (published value).\n"
    )
    yield from table(
        ("", *report["columns"]),
        (
            [
                row["label"],
                *(
                    _cell(
                        row["own"].get(name),
                        row["intervals"].get(name),
                        row["paper"].get(name),
                    )
                    for name in report["columns"]
                ),
            ]
            for row in report["rows"]
        ),
    )
    yield ""
    yield from (f"- {note}" for note in report["notes"])
    # Several rows can lack the same data. Only the first of these rows is named.
    missing: dict[str, str] = {}
    for row in report["rows"]:
        missing.setdefault(row["missing"], row["label"])
    yield from (
        f"- {label} was not measured: {text}" for text, label in missing.items() if text
    )


def prior_art_figure(rows: Sequence[Report]) -> str:
    """Return an SVG image that plots the recall of each row against the milliseconds
    that the row takes to score 64 pairs. Published values are circles, and measured
    values are filled discs.
    """
    x = "64 pairs, ms"
    y = "Flickr T2I"
    points = []
    for row in rows:
        for kind, colour in (("paper", "none"), ("own", "black")):
            time, recall = (row[kind].get(name) for name in (x, y))
            if time and recall:
                label = f"{row['label']}: {recall:g} at {time:.3g}"
                points.append((time, Estimate(recall), label, colour))
    return scatter_plot(f"{y}, in percent, over {x} (logarithmic)", points)


def _cell(
    own: float | None, interval: tuple[float, float] | None, paper: float | None
) -> str:
    left = "-"
    if own is not None:
        left = f"{own:,.1f}" if abs(own) >= 1 else f"{own:.3g}"
    if interval is not None:
        left += f" [{interval[0]:.1f}, {interval[1]:.1f}]"
    return left if paper is None else f"{left} ({paper:.4g})"


_DIRECTIONS = ("T2I", "I2T")
_RECALLS = tuple(
    f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in (1, 5, 10)
)
_FULL_RECALLS = tuple(
    f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in (5, 10, 20)
)
_POOLS = (5, 10, 20, 50, 100)
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
FIGURE = "prior-art.svg"
# number of pairs, or of images, in a timed batch, as in the paper
_BATCH = 64
_STAGES = ("text", "nearest", "fetch", "score")
_COMPRESSED = Variant()


def _recall(
    results: Sequence[Report],
    column: str,
    pool: int | None = POOL,
    precision: str = "bf16",
) -> Estimate | None:
    """Return the recall `column`, for example "T2I R@1", in percent; None if `results`
    do not contain it.

    If `pool` is None, return the recall of the embeddings alone, without re-ranking.
    """
    direction, _, cutoff = column.lower().partition(" r@")
    wanted = (direction, pool, None if pool is None else precision)
    for result in results:
        if (result["direction"], result.get("pool"), result.get("precision")) == wanted:
            return Estimate(**result["recall"][cutoff])
    return None


def _recalls(
    study: Study,
    variant: Variant,
    pool: int | None = POOL,
    pools: Sequence[int] = (POOL,),
) -> Values:
    """Return the recalls on Flickr30k after the first training phase. If `pool` is
    None, return the recalls of the embeddings alone, without re-ranking.
    """
    if pool is None:
        results = study.results(study.tower(variant.tower), "flickr", score="embedding")
    else:
        results = study.results(study.trained(variant), "flickr", pools)
    return [_recall(results, column, pool) for column in _RECALLS]


def _r1(study: Study, variant: Variant) -> Values:
    """Return R@1 of both directions, first on Flickr30k after the first training phase,
    then on COCO after the second phase.
    """
    flickr = study.results(study.trained(variant), "flickr")
    coco = study.results(study.trained(variant, "finetune"), "coco")
    return [
        _recall(results, f"{each} R@1")
        for results in (flickr, coco)
        for each in _DIRECTIONS
    ]


def _prior_art(study: Study, variant: Variant) -> Values:
    recalls = _r1(study, variant)
    bundle = study.trained(variant)
    tokens, width = _block_shape(study, variant)
    scored = _rerank(study, bundle).get("joint_encoder")
    vision = _vision_milliseconds(study, bundle)
    # There is no report if commands are only listed.
    if scored is None:
        return recalls
    # The last rate of this batch size is that of the largest number of threads.
    *_, rate = (
        each
        for name, each in scored["median"].items()
        if name.startswith(f"batch {_BATCH},")
    )
    return [
        *recalls,
        2 * tokens * width / 1000,
        scored["parameters"] / 1e6,
        _BATCH / rate * 1e3,
        vision,
    ]


def _embeddings_r1(study: Study) -> Values:
    results = study.results(study.tower(_COMPRESSED.tower), "flickr", score="embedding")
    return [_recall(results, f"{direction} R@1", None) for direction in _DIRECTIONS]


def _quantized(study: Study, variant: Variant, precision: str) -> Values:
    options = [word for name in _PRECISIONS for word in ("--precision", name)]
    results = study.results(study.trained(variant), "flickr", (10,), *options)
    sizes = (
        each["bytes_per_image"] / 1000
        for each in results
        if each.get("precision") == precision
    )
    return [_recall(results, "T2I R@1", 10, precision), next(sizes, None)]


def _aligned(study: Study, key: str, variant: Variant) -> Values:
    local, compressed = (
        study.build(study.trained(each), "flickr")[0] for each in (LOCAL, _COMPRESSED)
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
    scores = report["alignment"][key]
    effect = report["alignment"]["test"]["effect_size"]
    return [
        tokens,
        scores["mean"],
        scores["deviation"],
        effect if key == "second" else None,
    ]


def _block_shape(study: Study, variant: Variant) -> list[Any]:
    shape: list[Any] = study.command("show", "model", "show", study.trained(variant))[
        1
    ].get("block_shape", [None] * 2)
    return shape


def _words(study: Study, variant: Variant) -> Values:
    index = study.build(study.trained(variant), "flickr")[0]
    tokens, _ = _block_shape(study, variant)
    report = study.command("words", "explain", index, "--out", f"{OUT}/explain.html")[1]
    if not report:
        return ()
    words = report["words"]
    return [tokens, len(words["words"]), 100 * words["unused"] / words["tokens"]]


def _full(study: Study, benchmark: str) -> Values:
    phase = "pretrain" if benchmark == "flickr" else "finetune"
    bundle = study.trained(LOCAL, phase)
    results = study.results(bundle, benchmark, (100,), full=True)
    return [_recall(results, column, 100) for column in _FULL_RECALLS]


def _fetch(study: Study) -> Values:
    make = f"bench make-synthetic {OUT}/random.edje --rows {bench.PAPER.rows}"
    index = study.command("synthetic", *make.split())[0] / "random.edje"
    options = ["--paper", "--precision", "bf16", "--repeats", "3"]
    report = study.command("fetch", "bench", "fetch", index, *options)[1]
    if not report:
        return ()
    rates = {
        row["workload"]["is_contiguous"]: row["gb_per_s"][0]
        for row in report["rows"]
        if (row["subject"], row["cache"]) == (READER, "cold")
    }
    return [rates[is_contiguous] for is_contiguous in (True, False)]


def _query_times(study: Study, variant: Variant) -> Values:
    bundle = study.trained(variant)
    report = _rerank(
        study, bundle, "--index", study.build(bundle, "flickr")[0], "--pool", _BATCH
    )
    times = report.get("query", {"ms": {}})["ms"]
    return [
        *(times.get(stage) for stage in _STAGES),
        _vision_milliseconds(study, bundle),
    ]


def _rerank(study: Study, bundle: Path, *options: object) -> Report:
    command = ("bench", "rerank", "--model", bundle)
    return study.command("rerank", *command, *options)[1]


def _vision_milliseconds(study: Study, bundle: Path) -> float | None:
    """Return the milliseconds that the vision tower and the adapter take for 64 images.
    Return None if commands are only listed.
    """
    report = study.build(bundle, "flickr")[1]
    if not report:
        return None
    seconds = float(report["stage_seconds"]["encode"])
    return 1e3 * _BATCH * seconds / int(report["indexed"])


_CLIP = "clip-l14-336"
_NO_MLM = "objective.mlm_weight=0"
_NO_RECOVERY = "objective.recovery_weight=0"
_BOTH = (("local", LOCAL), ("64 tokens", _COMPRESSED))
_MEASUREMENTS: dict[str, dict[str, tuple[Callable[..., Values], *tuple[Any, ...]]]] = {
    "prior-art": {
        "Local, ViT-B/16": (_prior_art, replace(LOCAL, tower="siglip2-b16-384")),
        "Local, ViT-L/16": (_prior_art, LOCAL),
        "Compressed-128, ViT-L/16": (_prior_art, Variant(tokens=128)),
        "Compressed-64, ViT-L/16": (_prior_art, _COMPRESSED),
    },
    "zero-shot": {
        **{
            f"{tower}: {kind}": (_recalls, replace(LOCAL, tower=tower), pool)
            for tower in TOWERS
            for kind, pool in (("embeddings", None), ("re-ranked", POOL))
        },
        f"{MAIN_TOWER}: re-ranked, 64 tokens": (_recalls, _COMPRESSED),
    },
    "tokens": {
        "local": (_recalls, LOCAL),
        **{
            f"{tokens} tokens": (_recalls, Variant(tokens=tokens))
            for tokens in (32, 64, 128, 256)
        },
    },
    "pool-size": {
        f"{name}, pool {pool}": (_recalls, variant, pool, _POOLS)
        for name, variant in _BOTH
        for pool in _POOLS
    },
    "objectives": {
        "matching": (_recalls, replace(LOCAL, settings=(_NO_MLM, _NO_RECOVERY))),
        "matching, masked words": (_recalls, replace(LOCAL, settings=(_NO_RECOVERY,))),
        "matching, masked words, recovery": (_recalls, LOCAL),
    },
    "distillation": {
        "without": (_recalls, Variant(distilled=False)),
        "with": (_recalls, _COMPRESSED),
    },
    "adapters": {
        "embeddings alone": (_embeddings_r1,),
        **{
            adapter: (_r1, Variant(adapter=adapter))
            for adapter in ("strided", "clustered", "pruned", "compressed")
        },
    },
    "language-model": {
        language: (
            _recalls,
            replace(LOCAL, tower="siglip2-b16-384", language=language),
        )
        for language in LANGUAGES
    },
    "mining": {
        _CLIP: (_r1, replace(LOCAL, tower=_CLIP)),
        f"{_CLIP}, mined by {MAIN_TOWER}": (
            _r1,
            replace(LOCAL, tower=_CLIP, miner=MAIN_TOWER),
        ),
        MAIN_TOWER: (_r1, LOCAL),
        f"{MAIN_TOWER}, mined by {_CLIP}": (_r1, replace(LOCAL, miner=_CLIP)),
    },
    "quantization": {
        f"{name}, {precision}": (_quantized, variant, precision)
        for name, variant in _BOTH
        for precision in _PRECISIONS
    },
    "alignment": {
        "local": (_aligned, "first", LOCAL),
        "compressed": (_aligned, "second", _COMPRESSED),
    },
    "words": {"compressed": (_words, _COMPRESSED), "local": (_words, LOCAL)},
    "full-dataset": {name: (_full, name) for name in ("flickr", "coco")},
    "io-test": {"blocks of 64 x 384": (_fetch,)},
    "time-breakdown": {name: (_query_times, variant) for name, variant in _BOTH},
}
EXPERIMENTS = {
    name: Experiment(**published, measurements=_MEASUREMENTS[name])
    for name, published in tomllib.loads(
        Path(__file__).with_name("published.toml").read_text()
    ).items()
}
"""The experiments of `bench paper`, by name."""
OF_A_MODEL = ("zero-shot", "prior-art", "pool-size", "quantization")
"""The experiments in which a trained model can be measured without further training."""
