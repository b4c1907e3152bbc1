"""The tables and figures of the EDJE paper: their rows with the published values,
and how each row is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.paper.study import (
    LOCAL,
    MAIN_TOWER,
    OUT,
    POOL,
    MissingDataError,
    Study,
    Variant,
)
from benchmarks.report import Say, table
from storage_formats.atomic import write_bytes_atomic
from storage_formats.threads import usable_cpus

Values: TypeAlias = Sequence[float | None]
"""Values by column, without the last columns if they are unknown. None is an
unknown value.
"""
Row: TypeAlias = tuple[str, Values, Callable[..., Values] | None, tuple[Any, ...]]
"""(label, published values, function, arguments). `function(study, *arguments)`
measures the row. The function is None for other models, which show only the published
values.
"""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the EDJE paper.

    Attributes:
        source: table, figure or section of the EDJE paper.
    """

    title: str
    source: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    notes: tuple[str, ...] = ()


def run_experiments(
    names: Sequence[str],
    say: Say,
    *,
    data: Path,
    out: Path,
    config: Path | None = None,
    listing: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run experiments and write their tables to `out`. Return the tables by name.
    See `Study` for the arguments.
    """
    study = Study(data, out, say, config, listing)
    reports = {name: measured(EXPERIMENTS[name], study) for name in names}
    if not listing:
        for name, report in reports.items():
            write_bytes_atomic(
                out / f"{name}.md", "\n".join([*report_lines(report), ""]).encode()
            )
        if "prior-art" in reports:
            figure = scatter_plot(reports["prior-art"]["rows"], "64 pairs, ms", _R1[0])
            write_bytes_atomic(out / FIGURE, figure.encode())
    return reports


def measured(experiment: Experiment, study: Study) -> dict[str, Any]:
    """Measure all rows of an experiment.

    Returns:
        The table as a JSON object. The key `missing` of a row names data that are
        missing to measure it. `state` is "complete" if all rows have measured values,
        "partial" if some have, and "needs data" if none has.
    """
    rows = []
    has_values = []
    values: Values
    for label, paper, function, arguments in experiment.rows:
        values = ()
        missing = None
        if function is not None:
            try:
                values = function(study, *arguments)
            except MissingDataError as error:
                missing = str(error)
            has_values.append(any(value is not None for value in values))
        own, published = (
            dict(zip(experiment.columns, each, strict=False))
            for each in (values, paper)
        )
        rows.append(
            {"label": label, "own": own, "paper": published, "missing": missing}
        )
    return {
        "title": experiment.title,
        "source": experiment.source,
        "columns": experiment.columns,
        "state": (
            "complete"
            if all(has_values)
            else "partial"
            if any(has_values)
            else "needs data"
        ),
        "rows": rows,
        "notes": experiment.notes,
    }


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        f"## {report['title']}\n\n{report['source']}. Each cell: measured value"
        " (published value).\n"
    )
    yield from table(
        ("", *report["columns"]),
        (
            [
                row["label"],
                *(
                    _cell(row["own"].get(name), row["paper"].get(name))
                    for name in report["columns"]
                ),
            ]
            for row in report["rows"]
        ),
    )
    yield ""
    yield from (f"- {note}" for note in report["notes"])
    # the first row that lacks the data
    missing: dict[str, str] = {}
    for row in report["rows"]:
        missing.setdefault(row["missing"], row["label"])
    yield from (
        f"- {label} was not measured: {text}" for text, label in missing.items() if text
    )


def scatter_plot(rows: Sequence[dict[str, Any]], x: str, y: str) -> str:
    """Return an SVG image with one point per row: column `y` over the logarithm of
    column `x`.

    Published values are circles, and measured values are discs.
    """
    points: list[tuple[float, float]] = []
    names: list[tuple[str, str]] = []
    for row in rows:
        for kind, fill in (("paper", "none"), ("own", "black")):
            if row[kind].get(x) and row[kind].get(y):
                points.append((math.log10(row[kind][x]), row[kind][y]))
                names.append(
                    (f"{row['label']}: {row[kind][y]:g} at {row[kind][x]:.3g}", fill)
                )
    left, low = map(min, zip(*points, strict=True))
    right, high = map(max, zip(*points, strict=True))
    marks = []
    for (at, value), (text, fill) in zip(points, names, strict=True):
        across = 40 + 440 * (at - left) / (right - left or 1)
        down = 360 - 300 * (value - low) / (high - low or 1)
        marks += [
            (
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{fill}"'
                ' stroke="black"/>'
            ),
            f'<text x="{across + 8:.1f}" y="{down + 4:.1f}">{text}</text>',
        ]
    title = f'<text x="8" y="20">{y}, in percent, over {x} (logarithmic)</text>'
    style = 'font-family="sans-serif" font-size="11"'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400"'
        f" {style}>{title}{''.join(marks)}</svg>\n"
    )


def _cell(own: float | None, paper: float | None) -> str:
    left = "-" if own is None else f"{own:,.1f}" if abs(own) >= 1 else f"{own:.3g}"
    return left if paper is None else f"{left} ({paper:.4g})"


_DIRECTIONS = ("T2I", "I2T")
_RECALLS = tuple(
    f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in (1, 5, 10)
)
_FULL_RECALLS = tuple(
    f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in (5, 10, 20)
)
_R1 = ("Flickr T2I", "Flickr I2T", "COCO T2I", "COCO I2T")
_POOLS = (5, 10, 20, 50, 100)
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
FIGURE = "prior-art.svg"
# of the index in the experiment `io-test`
FETCH_ROWS = 100_000
# pairs and images per timed batch, as in the paper
_BATCH = 64
_STAGES = ("text", "nearest", "fetch", "score")
_COMPRESSED = Variant()


def _recall(
    results: Sequence[dict[str, Any]],
    column: str,
    pool: int | None = POOL,
    precision: str = "bf16",
) -> float | None:
    """Return the recall `column`, for example "T2I R@1", in percent; None if `results`
    do not contain it.

    If `pool` is None, return the recall of the embeddings alone, without re-ranking.
    """
    direction, _, cutoff = column.lower().partition(" r@")
    wanted = (direction, pool, None if pool is None else precision)
    for result in results:
        if (result["direction"], result.get("pool"), result.get("precision")) == wanted:
            return float(result["recall"][cutoff]["value"])
    return None


def _recalls(
    study: Study,
    variant: Variant,
    pool: int | None = POOL,
    pools: Sequence[int] = (POOL,),
) -> Values:
    """Return the recalls on Flickr30k after the first training phase. None as
    `pool` evaluates embeddings alone.
    """
    if pool is None:
        results = study.results(study.tower(variant.tower), "flickr", score="embedding")
    else:
        results = study.results(study.trained(variant), "flickr", pools)
    return [_recall(results, column, pool) for column in _RECALLS]


def _r1(study: Study, variant: Variant) -> list[float | None]:
    """Return R@1: on Flickr30k after the first training phase, and on COCO after
    the second phase.
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
    scored = next(iter(_rerank(study, bundle).get("joint_encoders", {}).values()), None)
    return [
        *recalls,
        None if tokens is None else 2 * tokens * width / 1000,
        None if scored is None else scored["parameters"] / 1e6,
        (
            None
            if scored is None
            else _BATCH / next(iter(scored["median"].values())) * 1e3
        ),
        _vision_milliseconds(study, bundle),
    ]


def _embeddings_r1(study: Study) -> Values:
    results = study.results(study.tower(_COMPRESSED.tower), "flickr", score="embedding")
    return [_recall(results, f"{direction} R@1", None) for direction in _DIRECTIONS]


def _quantized(study: Study, variant: Variant, precision: str) -> Values:
    options = [word for name in _PRECISIONS for word in ("--precision", name)]
    results = study.results(
        study.trained(variant), "flickr", (10,), *options, "--direction", "t2i"
    )
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
    bundle = study.trained(LOCAL, "pretrain" if benchmark == "flickr" else "finetune")
    results = study.results(bundle, benchmark, (100,), full=True)
    return [_recall(results, column, 100) for column in _FULL_RECALLS]


def _fetch(study: Study) -> Values:
    make = [
        "bench",
        "make-synthetic",
        f"{OUT}/random.edje",
        "--rows",
        FETCH_ROWS,
        "--precision",
        "bf16",
    ]
    index = study.command("synthetic", *make)[0] / "random.edje"
    options = ["--pool", FETCH_ROWS // 2, "--cold", "--repeats", 3]
    report = study.command("fetch", "bench", "fetch", index, *options)[1]
    if not report:
        return ()
    sections = report["precisions"]["bf16"]["sections"]
    return [
        sections[f"cold {each}"]["entries"]["edje"]["summary"]["gb_per_s"]
        for each in ("contiguous", "random")
    ]


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


def _rerank(study: Study, bundle: Path, *options: object) -> dict[str, Any]:
    command = [
        "bench",
        "rerank",
        "--model",
        bundle,
        "--batch-size",
        _BATCH,
        "--threads",
        usable_cpus(),
        "--repeats",
        3,
    ]
    return study.command("rerank", *command, *options)[1]


def _vision_milliseconds(study: Study, bundle: Path) -> float | None:
    """Return the milliseconds of vision tower and adapter for 64 images; None if
    commands are only listed.
    """
    report = study.build(bundle, "flickr")[1]
    return (
        1e3 * _BATCH * report["stage_seconds"]["encode"] / report["indexed"]
        if report
        else None
    )


# By towers: recalls of the embeddings alone, and re-ranked locally.
_ZERO_SHOT = {
    "clip-b16-224": (
        (62.1, 85.6, 91.8, 81.3, 96.1, 98.3),
        (76.8, 90.7, 91.7, 91.1, 98.2, 98.4),
    ),
    "clip-l14-224": (
        (65.2, 87.0, 92.1, 85.1, 97.1, 98.9),
        (80.6, 91.4, 92.2, 92.8, 98.5, 98.9),
    ),
    "clip-l14-336": (
        (67.7, 88.8, 93.3, 86.7, 98.2, 99.0),
        (81.9, 92.8, 93.3, 93.8, 98.6, 99.9),
    ),
    "dfn-l14-224": (
        (75.1, 92.7, 96.0, 90.0, 98.6, 99.4),
        (77.5, 94.0, 96.1, 91.1, 98.4, 99.4),
    ),
    "metaclip-l14-224": (
        (76.3, 93.6, 96.3, 90.6, 98.5, 99.5),
        (79.2, 94.5, 96.3, 91.9, 99.0, 99.5),
    ),
    "siglip2-b16-384": (
        (82.1, 95.5, 97.9, 93.8, 99.3, 99.9),
        (84.3, 96.6, 97.9, 94.3, 99.9, 99.9),
    ),
    "siglip2-l16-384": (
        (82.3, 96.0, 98.0, 94.8, 99.6, 99.9),
        (87.8, 97.3, 98.0, 96.5, 99.8, 99.9),
    ),
}
_LOCAL_RECALLS = _ZERO_SHOT[MAIN_TOWER][1]
_CLIP = "clip-l14-336"
_SIGLIP = MAIN_TOWER
_NO_MLM = "objective.mlm_weight=0"
_NO_RECOVERY = "objective.recovery_weight=0"

EXPERIMENTS: dict[str, Experiment] = {
    "prior-art": Experiment(
        "Comparison with prior art, R@1 in percent",
        "Table 2 and Figure 1 (b)",
        (
            *_R1,
            "kB per image",
            "joint encoder, M parameters",
            "64 pairs, ms",
            "64 images, ms",
        ),
        [
            (label, paper, _prior_art if variant else None, (variant,))
            for label, variant, paper in (
                ("ALBEF, ViT-B/16", None, (82.8, 94.1, 60.7, 77.6, 1769, 147, 45.92)),
                (
                    "BLIP, ViT-B/16",
                    None,
                    (84.9, 94.8, 63.1, 80.6, 1769, 139, 83.27, 400),
                ),
                (
                    "BLIP, ViT-L/16",
                    None,
                    (86.7, 96.7, 65.1, 82.4, 2359, 139, 101.61, 1400),
                ),
                (
                    "BLIP-2, ViT-L/16",
                    None,
                    (88.6, 96.9, 66.3, 83.5, 2359, 167, 98.64, 1400),
                ),
                (
                    "Local, ViT-B/16",
                    replace(LOCAL, tower="siglip2-b16-384"),
                    (84.3, 94.3, 60.9, 76.1, 442, 33, 2.86),
                ),
                ("Local, ViT-L/16", LOCAL, (87.8, 96.5, 64.9, 81.0, 442, 33, 4.14)),
                (
                    "Compressed-128, ViT-L/16",
                    Variant(tokens=128),
                    (87.1, 96.3, 64.6, 81.0, 98, 33, 2.04),
                ),
                (
                    "Compressed-64, ViT-L/16",
                    _COMPRESSED,
                    (86.9, 96.4, 64.6, 80.9, 49, 33, 1.91),
                ),
            )
        ],
        (
            (
                "The published times were measured on an A6000 GPU, and our times on"
                " this machine."
            ),
            (
                "64 images is the time of the vision tower, which runs once per image."
                " The paper's Figure 1 shows it."
            ),
            (
                f"{FIGURE} plots R@1 over the time of 64 pairs, as Figure 1 (b) does."
                " ALBEF and BLIP were not measured."
            ),
        ),
    ),
    "zero-shot": Experiment(
        "Zero-shot retrieval on Flickr30k, in percent",
        "Table 1",
        _RECALLS,
        [
            (f"{tower}: {kind}", paper, _recalls, (replace(LOCAL, tower=tower), pool))
            for tower, (embeddings, reranked) in _ZERO_SHOT.items()
            for kind, paper, pool in (
                ("embeddings", embeddings, None),
                ("re-ranked", reranked, POOL),
            )
        ],
    ),
    "tokens": Experiment(
        "Recall by number of tokens, in percent",
        "Figure: retrieval performance vs. number of tokens",
        _RECALLS,
        [
            ("32 tokens", (), _recalls, (Variant(tokens=32),)),
            ("64 tokens", (86.9, None, None, 96.4), _recalls, (Variant(tokens=64),)),
            ("128 tokens", (87.1, None, None, 96.3), _recalls, (Variant(tokens=128),)),
            ("256 tokens", (), _recalls, (Variant(tokens=256),)),
            ("local", _LOCAL_RECALLS, _recalls, (LOCAL,)),
        ],
    ),
    "pool-size": Experiment(
        "Recall by pool size, in percent",
        "Figure: retrieval performance vs. re-ranking pool size",
        _RECALLS,
        [
            (
                f"{name}, pool {pool}",
                _LOCAL_RECALLS if (variant, pool) == (LOCAL, POOL) else (),
                _recalls,
                (variant, pool, _POOLS),
            )
            for name, variant in (("local", LOCAL), ("64 tokens", _COMPRESSED))
            for pool in _POOLS
        ],
        (
            (
                "In our R@10 with 5 candidates, the next 5 by embeddings follow them."
                " The published code counts 5 alone."
            ),
        ),
    ),
    "objectives": Experiment(
        "Recall of the local model by training objective, in percent",
        "Table: ablation on training objectives",
        _RECALLS,
        [
            (
                "matching",
                (82.3,),
                _recalls,
                (replace(LOCAL, settings=(_NO_MLM, _NO_RECOVERY)),),
            ),
            (
                "matching, masked words",
                (85.5,),
                _recalls,
                (replace(LOCAL, settings=(_NO_RECOVERY,)),),
            ),
            ("matching, masked words, recovery", (87.8,), _recalls, (LOCAL,)),
        ],
        ("The paper calls text-embedding recovery ITC in this table.",),
    ),
    "distillation": Experiment(
        "Recall with 64 tokens, with and without distillation from the local model, in"
        " percent",
        "Table: effect of distillation",
        _RECALLS,
        [
            ("without", (83.8,), _recalls, (Variant(distilled=False),)),
            ("with", (86.9,), _recalls, (_COMPRESSED,)),
        ],
    ),
    "adapters": Experiment(
        "Token compression to 64 tokens, R@1 in percent",
        "Table: comparison of token-compression strategies",
        _R1,
        [
            ("embeddings alone", (82.3, 94.8), _embeddings_r1, ()),
            ("strided", (83.24, 94.1, 60.09, 77.2), _r1, (Variant(adapter="strided"),)),
            (
                "clustered",
                (85.66, 96.1, 63.31, 79.76),
                _r1,
                (Variant(adapter="clustered"),),
            ),
            ("pruned", (82.4, 93.7, 58.6, 76.4), _r1, (Variant(adapter="pruned"),)),
            ("compressed", (86.9, 96.4, 64.6, 80.9), _r1, (_COMPRESSED,)),
        ],
    ),
    "language-model": Experiment(
        "Recall by language model, in percent",
        "Table: MiniLM and BERT-Base",
        _RECALLS,
        [
            (
                language,
                paper,
                _recalls,
                (replace(LOCAL, tower="siglip2-b16-384", language=language),),
            )
            for language, paper in (
                ("minilm-l12", (84.3, 96.6, 97.9, 94.3, 99.9, 99.9)),
                ("bert-base", (84.52, 96.58, 97.9, 93.9, 99.9, 99.9)),
            )
        ],
        (
            (
                "The text of the paper names the compressed model, but the MiniLM row"
                " has the values of the local model."
            ),
        ),
    ),
    "mining": Experiment(
        "Mining of hard negatives with other towers, R@1 in percent",
        "Tables: cross-model negative mining",
        _R1,
        [
            (label, paper, _r1, (variant,))
            for label, paper, variant in (
                (_CLIP, (81.9, 93.8, 54.6, 70.7), replace(LOCAL, tower=_CLIP)),
                (
                    f"{_CLIP}, mined by {_SIGLIP}",
                    (81.8, 93.5, 54.6, 70.8),
                    replace(LOCAL, tower=_CLIP, miner=_SIGLIP),
                ),
                (_SIGLIP, (87.8, 96.5, 64.9, 81.0), LOCAL),
                (
                    f"{_SIGLIP}, mined by {_CLIP}",
                    (81.5, 93.0, 58.9, 74.48),
                    replace(LOCAL, miner=_CLIP),
                ),
            )
        ],
    ),
    "quantization": Experiment(
        "Recall by precision of the stored tokens",
        "Figure: recall against storage size, with numbers only for BF16",
        ("T2I R@1", "kB per image"),
        [
            (
                f"{name}, {precision}",
                paper if precision == "bf16" else (),
                _quantized,
                (variant, precision),
            )
            for name, variant, paper in (
                ("local", LOCAL, (87.8, 442.0)),
                ("64 tokens", _COMPRESSED, (86.9, 49.0)),
            )
            for precision in _PRECISIONS
        ],
    ),
    "alignment": Experiment(
        "Alignment score S of caption words and image tokens",
        "Figure: distribution of alignment scores",
        ("tokens", "mean", "standard deviation", "effect size"),
        [
            ("local", (576, 0.2404, 0.0405), _aligned, ("first", LOCAL)),
            (
                "compressed",
                (64, 0.2516, 0.0491, 0.39),
                _aligned,
                ("second", _COMPRESSED),
            ),
        ],
    ),
    "words": Experiment(
        "Nearest words of the tokens of 1,000 test images",
        "Figures: three word clouds, without numbers",
        ("tokens", "different words", "nearest to an unused word, percent"),
        [
            ("compressed", (64,), _words, (_COMPRESSED,)),
            ("local", (576,), _words, (LOCAL,)),
        ],
        (
            (
                "steps/words-*/explain.html shows the word clouds of six images. The"
                " paper does not name its two photos."
            ),
        ),
    ),
    "full-dataset": Experiment(
        "Retrieval among all images and captions of a dataset, in percent",
        "Tables: Flickr Full and COCO Full, pool 100",
        _FULL_RECALLS,
        [
            ("flickr, LightningDOT", (60.1, 69.5, 78.3, 75.1, 83.9, 90.5), None, ()),
            ("flickr", (78.32, 84.54, 89.58, 92.4, 95.9, 97.7), _full, ("flickr",)),
            ("coco, LightningDOT", (37.3, 46.8, 56.4, 48.0, 59.0, 68.9), None, ()),
            ("coco", (52.23, 60.55, 68.08, 69.86, 76.96, 82.64), _full, ("coco",)),
        ],
    ),
    "io-test": Experiment(
        "Fetching half of the blocks of an index, in contiguous and in random order",
        "Section: Token-Fetch I/O Considerations",
        ("GB/s, contiguous", "GB/s, random"),
        [("blocks of 64 x 384", (2.46 / 0.39, 2.46 / 0.59), _fetch, ())],
        (
            (
                "The paper read 50,000 of 100,000 blocks through a memory-mapped NumPy"
                " array on a PCIe 4.0 disk, and does not say whether the page cache was"
                " empty. Our runs start with an empty page cache, and decode blocks to"
                " BF16."
            ),
        ),
    ),
    "time-breakdown": Experiment(
        "Time of each stage of a query of 64 candidates",
        "Figure 1 (a), without numbers",
        (*(f"{stage}, ms" for stage in _STAGES), "vision tower, ms"),
        [
            (name, (), _query_times, (variant,))
            for name, variant in (("local", LOCAL), ("64 tokens", _COMPRESSED))
        ],
        (
            (
                "A joint encoder without stored tokens would run the vision tower on"
                " all candidates of every query."
            ),
        ),
    ),
}
"""The experiments of `bench paper`, by name."""
