"""Tables and figures from the main part of the EDJE paper: recall, comparison with prior art, tokens, and pool size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.paper.costs import batch_milliseconds, embedding_milliseconds, joint_parameters
from benchmarks.paper.study import LOCAL, POOL, Recall, Study, Variant
from benchmarks.paper.tables import Table, Values

_CUTOFFS = (1, 5, 10)
_DIRECTIONS = ("T2I", "I2T")
_TOWER_NAMES = {
    "clip-b16-224": "CLIP ViT-B/16, 224",
    "clip-l14-224": "CLIP ViT-L/14, 224",
    "clip-l14-336": "CLIP ViT-L/14, 336",
    "dfn-l14-224": "DFN ViT-L/14, 224",
    "metaclip-l14-224": "MetaCLIP ViT-L/14, 224",
    "siglip2-b16-384": "SigLIP 2 ViT-B/16, 384",
    "siglip2-l16-384": "SigLIP 2 ViT-L/16, 384",
}
# R@1, 5, 10 of text to image, then of image to text: embeddings alone, and re-ranked by the local model.
_ZERO_SHOT = {
    "clip-b16-224": ((62.1, 85.6, 91.8, 81.3, 96.1, 98.3), (76.8, 90.7, 91.7, 91.1, 98.2, 98.4)),
    "clip-l14-224": ((65.2, 87.0, 92.1, 85.1, 97.1, 98.9), (80.6, 91.4, 92.2, 92.8, 98.5, 98.9)),
    "clip-l14-336": ((67.7, 88.8, 93.3, 86.7, 98.2, 99.0), (81.9, 92.8, 93.3, 93.8, 98.6, 99.9)),
    "dfn-l14-224": ((75.1, 92.7, 96.0, 90.0, 98.6, 99.4), (77.5, 94.0, 96.1, 91.1, 98.4, 99.4)),
    "metaclip-l14-224": ((76.3, 93.6, 96.3, 90.6, 98.5, 99.5), (79.2, 94.5, 96.3, 91.9, 99.0, 99.5)),
    "siglip2-b16-384": ((82.1, 95.5, 97.9, 93.8, 99.3, 99.9), (84.3, 96.6, 97.9, 94.3, 99.9, 99.9)),
    "siglip2-l16-384": ((82.3, 96.0, 98.0, 94.8, 99.6, 99.9), (87.8, 97.3, 98.0, 96.5, 99.8, 99.9)),
}
RECALL_COLUMNS = tuple(f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in _CUTOFFS)
_FULL_CUTOFFS = (5, 10, 20)
_FULL_COLUMNS = tuple(f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in _FULL_CUTOFFS)
_POOLS = (5, 10, 20, 50, 100)
R1_COLUMNS = ("Flickr T2I", "Flickr I2T", "COCO T2I", "COCO I2T")


def zero_shot(study: Study) -> Table:
    """Zero-shot recall on Flickr30k, for seven pairs of towers."""
    table = Table("Zero-shot retrieval on Flickr30k, in percent", "Table 1", RECALL_COLUMNS)
    for tower, (embeddings, reranked) in _ZERO_SHOT.items():
        variant = replace(LOCAL, tower=tower)
        name = _TOWER_NAMES[tower]
        table.add(f"{name}: embeddings", partial(pretrained_recalls, study, variant, None), row_of(embeddings))
        table.add(f"{name}: re-ranked", partial(pretrained_recalls, study, variant), row_of(reranked))
    return table


def prior_art(study: Study) -> Table:
    """Recall, storage, parameters and time of four EDJE models."""
    costs = ("kB per image", "joint encoder, M parameters", "64 pairs, ms", "64 images, ms")
    table = Table(
        "Comparison with prior art, R@1 in percent",
        "Table 2, rows of EDJE",
        (*R1_COLUMNS, *costs),
        notes=(
            "The published times were measured on an A6000 GPU, and our times on this machine.",
            "64 images is the time of the vision tower, which runs once per image. The paper's Figure 1 shows it.",
        ),
    )
    published = {
        "Local, ViT-B/16": (replace(LOCAL, tower="siglip2-b16-384"), (84.3, 94.3, 60.9, 76.1, 442, 33, 2.86)),
        "Local, ViT-L/16": (LOCAL, (87.8, 96.5, 64.9, 81.0, 442, 33, 4.14)),
        "Compressed-128, ViT-L/16": (Variant(tokens=128), (87.1, 96.3, 64.6, 81.0, 98, 33, 2.04)),
        "Compressed-64, ViT-L/16": (Variant(), (86.9, 96.4, 64.6, 80.9, 49, 33, 1.91)),
    }
    for label, (variant, paper) in published.items():
        figures = dict(zip(table.columns, paper, strict=False))
        table.add(label, partial(_recalls_and_costs, study, variant), figures)
    return table


def tokens(study: Study) -> Table:
    """Recall by number of stored tokens per image."""
    table = Table(
        "Recall by number of tokens, in percent", "Figure: retrieval performance vs. number of tokens", RECALL_COLUMNS
    )
    paper = {64: {"T2I R@1": 86.9, "I2T R@1": 96.4}, 128: {"T2I R@1": 87.1, "I2T R@1": 96.3}}
    for count in (32, 64, 128, 256):
        variant = Variant(tokens=count)
        table.add(f"{count} tokens", partial(pretrained_recalls, study, variant), paper.get(count))
    table.add("local", partial(pretrained_recalls, study, LOCAL), row_of(_ZERO_SHOT["siglip2-l16-384"][1]))
    return table


def pool_size(study: Study) -> Table:
    """Recall by number of candidates that are re-ranked."""
    table = Table(
        "Recall by pool size, in percent", "Figure: retrieval performance vs. re-ranking pool size", RECALL_COLUMNS
    )
    for name, variant in (("local", LOCAL), ("64 tokens", Variant())):
        for pool in _POOLS:
            paper = row_of(_ZERO_SHOT["siglip2-l16-384"][1]) if (variant, pool) == (LOCAL, POOL) else None
            table.add(f"{name}, pool {pool}", partial(_recalls_of_pool, study, variant, pool), paper)
    return table


def full_dataset(study: Study) -> Table:
    """Recall at 5, 10 and 20 if all images and captions of a dataset are candidates."""
    table = Table("Full-dataset retrieval, in percent", "Tables: Flickr Full and COCO Full, pool 100", _FULL_COLUMNS)
    paper = {
        "flickr": (78.32, 84.54, 89.58, 92.4, 95.9, 97.7),
        "coco": (52.23, 60.55, 68.08, 69.86, 76.96, 82.64),
    }
    for name, figures in paper.items():
        table.add(name, partial(_full_recalls, study, name), dict(zip(_FULL_COLUMNS, figures, strict=True)))
    return table


def r1(study: Study, variant: Variant) -> dict[str, float | None]:
    """Return R@1 of both directions: on Flickr30k after the first training phase, on COCO after the second phase."""
    flickr = study.recall(study.pretrained(variant), "flickr")
    coco = study.recall(study.finetuned(variant), "coco")
    return flickr.columns("Flickr", 1) | coco.columns("COCO", 1)


def all_recalls(recall: Recall, pool: int | None = POOL) -> dict[str, float | None]:
    """Return R@1, R@5 and R@10 of both directions by column name."""
    return {
        f"{direction} R@{cutoff}": recall.at(direction.lower(), cutoff, pool)
        for direction in _DIRECTIONS
        for cutoff in _CUTOFFS
    }


def row_of(figures: tuple[float, ...]) -> dict[str, float | None]:
    """Return the six published recalls in `figures` by column name."""
    return dict(zip(RECALL_COLUMNS, figures, strict=True))


def pretrained_recalls(study: Study, variant: Variant, pool: int | None = POOL) -> Values:
    """Return the recalls on Flickr30k after the first training phase.

    If `pool` is None, embeddings alone are evaluated.
    """
    return all_recalls(study.recall(study.pretrained(variant), "flickr"), pool)


def _recalls_of_pool(study: Study, variant: Variant, pool: int) -> Values:
    return all_recalls(study.recall(study.pretrained(variant), "flickr", _POOLS), pool)


def _full_recalls(study: Study, benchmark: str) -> Values:
    bundle = study.pretrained(LOCAL) if benchmark == "flickr" else study.finetuned(LOCAL)
    recall = study.recall(bundle, benchmark, (100,), full=True)
    keys = ((direction, cutoff) for direction in _DIRECTIONS for cutoff in _FULL_CUTOFFS)
    return {f"{direction} R@{cutoff}": recall.at(direction.lower(), cutoff, 100) for direction, cutoff in keys}


def _recalls_and_costs(study: Study, variant: Variant) -> Values:
    return {**r1(study, variant), **_costs(study, variant)}


def _costs(study: Study, variant: Variant) -> Values:
    bundle = study.pretrained(variant)
    shape = study.steps.command("show", "model", "show", bundle).report.get("block_shape")
    return {
        "kB per image": None if shape is None else 2 * shape[0] * shape[1] / 1000,
        "joint encoder, M parameters": joint_parameters(study, bundle),
        "64 pairs, ms": batch_milliseconds(study, bundle),
        "64 images, ms": embedding_milliseconds(study, bundle),
    }
