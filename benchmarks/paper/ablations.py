"""Ablations of the EDJE paper: objectives, distillation, adapters, language model, mining, and precisions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.paper.main_tables import R1_COLUMNS, RECALL_COLUMNS, pretrained_recalls, r1, row_of
from benchmarks.paper.study import LOCAL, Study, Variant
from benchmarks.paper.tables import Table, Values

_NO_MLM, _NO_RECOVERY = "objective.mlm_weight=0", "objective.recovery_weight=0"
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")


def objectives(study: Study) -> Table:
    """Recall of the local model, by training objective."""
    table = Table(
        "Training objectives, R@1 in percent",
        "Table: ablation on training objectives",
        ("T2I R@1",),
        notes=("The paper calls text-embedding recovery ITC in this table.",),
    )
    published = {
        "matching": ((_NO_MLM, _NO_RECOVERY), 82.3),
        "matching, masked words": ((_NO_RECOVERY,), 85.5),
        "matching, masked words, recovery": ((), 87.8),
    }
    for label, (settings, paper) in published.items():
        variant = replace(LOCAL, settings=settings)
        table.add(label, partial(_t2i, study, variant), {"T2I R@1": paper})
    return table


def distillation(study: Study) -> Table:
    """Recall of the compressed model, with and without distillation from the local model."""
    table = Table("Distillation with 64 tokens, R@1 in percent", "Table: effect of distillation", ("T2I R@1",))
    for label, distilled, paper in (("without", False, 83.8), ("with", True, 86.9)):
        variant = Variant(distilled=distilled)
        table.add(label, partial(_t2i, study, variant), {"T2I R@1": paper})
    return table


def adapters(study: Study) -> Table:
    """Recall by adapter, with 64 tokens per image."""
    table = Table("Token compression, R@1 in percent", "Table: comparison of token-compression strategies", R1_COLUMNS)

    def embeddings() -> Values:
        return study.recall(study.pretrained(Variant()), "flickr").columns("Flickr", 1, pool=None)

    table.add("embeddings alone", embeddings, {"Flickr T2I": 82.3, "Flickr I2T": 94.8})
    published = {
        "strided": (83.24, 94.1, 60.09, 77.2),
        "clustered": (85.66, 96.1, 63.31, 79.76),
        "pruned": (82.4, 93.7, 58.6, 76.4),
        "compressed": (86.9, 96.4, 64.6, 80.9),
    }
    for adapter, paper in published.items():
        variant = Variant(adapter=adapter)
        table.add(adapter, partial(r1, study, variant), dict(zip(R1_COLUMNS, paper, strict=True)))
    return table


def language_model(study: Study) -> Table:
    """Recall by language model: MiniLM or BERT-Base."""
    table = Table(
        "Language model, in percent",
        "Table: MiniLM and BERT-Base",
        RECALL_COLUMNS,
        notes=(
            "The text of the paper names the compressed model, but the MiniLM row has the values of the local model.",
        ),
    )
    published = {
        "minilm-l12": (84.3, 96.6, 97.9, 94.3, 99.9, 99.9),
        "bert-base": (84.52, 96.58, 97.9, 93.9, 99.9, 99.9),
    }
    for language, paper in published.items():
        variant = replace(LOCAL, tower="siglip2-b16-384", language=language)
        table.add(language, partial(pretrained_recalls, study, variant), row_of(paper))
    return table


def mining(study: Study) -> Table:
    """Recall if the hard negatives are mined with other towers."""
    table = Table("Mining with another model, R@1 in percent", "Tables: cross-model negative mining", R1_COLUMNS)
    clip, siglip = "clip-l14-336", "siglip2-l16-384"
    published = {
        (clip, None): (81.9, 93.8, 54.6, 70.7),
        (clip, siglip): (81.8, 93.5, 54.6, 70.8),
        (siglip, None): (87.8, 96.5, 64.9, 81.0),
        (siglip, clip): (81.5, 93.0, 58.9, 74.48),
    }
    for (tower, miner), paper in published.items():
        variant = replace(LOCAL, tower=tower, miner=miner)
        label = tower if miner is None else f"{tower}, mined by {miner}"
        table.add(label, partial(r1, study, variant), dict(zip(R1_COLUMNS, paper, strict=True)))
    return table


def quantization(study: Study) -> Table:
    """Recall by precision of the stored tokens, for the local and the compressed model."""
    table = Table(
        "Precision of the stored tokens",
        "Figure: recall against storage size, with numbers only for BF16",
        ("T2I R@1", "kB per image"),
    )
    published = {"local": (LOCAL, 87.8, 442.0), "64 tokens": (Variant(), 86.9, 49.0)}
    for name, (variant, recall, size) in published.items():
        for precision in _PRECISIONS:
            paper = {"T2I R@1": recall, "kB per image": size} if precision == "bf16" else None
            table.add(f"{name}, {precision}", partial(_of_precision, study, variant, precision), paper)
    return table


def alignment(study: Study) -> Table:
    """Alignment of caption words and image tokens, for the local and the compressed model."""
    columns = ("mean", "standard deviation", "effect size")
    table = Table("Alignment score S of captions and tokens", "Figure: distribution of alignment scores", columns)
    paper = {
        "576 tokens": {"mean": 0.2404, "standard deviation": 0.0405},
        "64 tokens": {"mean": 0.2516, "standard deviation": 0.0491, "effect size": 0.39},
    }
    for number, (label, figures) in enumerate(paper.items()):
        table.add(label, partial(_alignment, study, number), figures)
    return table


def _t2i(study: Study, variant: Variant) -> Values:
    return {"T2I R@1": study.recall(study.pretrained(variant), "flickr").at("t2i", 1)}


def _of_precision(study: Study, variant: Variant, precision: str) -> Values:
    options = [word for name in _PRECISIONS for word in ("--precision", name)]
    recall = study.recall(study.pretrained(variant), "flickr", (10,), *options, "--simulate", "--direction", "t2i")
    sizes = {
        result["precision"]: result["bytes_per_image"] / 1000
        for result in recall.report.get("results", ())
        if result.get("precision")
    }
    return {"T2I R@1": recall.at("t2i", 1, 10, precision), "kB per image": sizes.get(precision)}


def _alignment(study: Study, number: int) -> Values:
    local, compressed = (study.index(study.pretrained(variant), "flickr") for variant in (LOCAL, Variant()))
    captions = study.data.benchmark("flickr")
    options = ["--captions", captions.files[0], "--images", captions.images, "--against", compressed]
    options += ["--split", captions.split] if captions.split else []
    report = study.steps.command("explain", "explain", local, *options, "--out", "{out}/explain.html").report
    if not report:
        return {}
    result = report["alignment"]
    scores = result["second" if number else "first"]
    own = {"mean": scores["mean"], "standard deviation": scores["deviation"]}
    return own | ({"effect size": result["test"]["effect_size"]} if number else {})
