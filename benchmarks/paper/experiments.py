"""The tables and figures of the EDJE paper. Each function runs the missing steps and returns a table.

The first line of a function's docstring describes the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper.data import SMALL_MODEL, FullData, SmallData
from benchmarks.paper.study import LOCAL, POOL, Recall, Study, Variant
from benchmarks.paper.tables import Table, Values
from benchmarks.report import Say
from storage_formats.atomic import write_bytes_atomic
from storage_formats.cpus import usable_cpus

_CUTOFFS = (1, 5, 10)
_DIRECTIONS = ("T2I", "I2T")
_RECALLS = tuple(f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in _CUTOFFS)
_R1 = ("Flickr T2I", "Flickr I2T", "COCO T2I", "COCO I2T")
_FULL_CUTOFFS = (5, 10, 20)
_FULL_RECALLS = tuple(f"{direction} R@{cutoff}" for direction in _DIRECTIONS for cutoff in _FULL_CUTOFFS)
_POOLS = (5, 10, 20, 50, 100)
_PRECISIONS = ("bf16", "fp8", "nvfp4", "sign1")
_BATCH = 64  # pairs and images per timed batch, as in the paper
_STAGES = ("text", "nearest", "fetch", "score")
_COMPRESSED = Variant()
# Title of the towers; R@1, 5, 10 of text to image, then of image to text: embeddings alone, and re-ranked locally.
_ZERO_SHOT = {
    "clip-b16-224": (
        "CLIP ViT-B/16, 224",
        (62.1, 85.6, 91.8, 81.3, 96.1, 98.3),
        (76.8, 90.7, 91.7, 91.1, 98.2, 98.4),
    ),
    "clip-l14-224": (
        "CLIP ViT-L/14, 224",
        (65.2, 87.0, 92.1, 85.1, 97.1, 98.9),
        (80.6, 91.4, 92.2, 92.8, 98.5, 98.9),
    ),
    "clip-l14-336": (
        "CLIP ViT-L/14, 336",
        (67.7, 88.8, 93.3, 86.7, 98.2, 99.0),
        (81.9, 92.8, 93.3, 93.8, 98.6, 99.9),
    ),
    "dfn-l14-224": (
        "DFN ViT-L/14, 224",
        (75.1, 92.7, 96.0, 90.0, 98.6, 99.4),
        (77.5, 94.0, 96.1, 91.1, 98.4, 99.4),
    ),
    "metaclip-l14-224": (
        "MetaCLIP ViT-L/14, 224",
        (76.3, 93.6, 96.3, 90.6, 98.5, 99.5),
        (79.2, 94.5, 96.3, 91.9, 99.0, 99.5),
    ),
    "siglip2-b16-384": (
        "SigLIP 2 ViT-B/16, 384",
        (82.1, 95.5, 97.9, 93.8, 99.3, 99.9),
        (84.3, 96.6, 97.9, 94.3, 99.9, 99.9),
    ),
    "siglip2-l16-384": (
        "SigLIP 2 ViT-L/16, 384",
        (82.3, 96.0, 98.0, 94.8, 99.6, 99.9),
        (87.8, 97.3, 98.0, 96.5, 99.8, 99.9),
    ),
}
_LOCAL_RECALLS = dict(zip(_RECALLS, _ZERO_SHOT["siglip2-l16-384"][2], strict=True))


def prior_art(study: Study) -> Table:
    """Recall, storage, parameters and time of four EDJE models."""
    costs = ("kB per image", "joint encoder, M parameters", "64 pairs, ms", "64 images, ms")
    table = Table(
        "Comparison with prior art, R@1 in percent",
        "Table 2, rows of EDJE",
        (*_R1, *costs),
        notes=(
            "The published times were measured on an A6000 GPU, and our times on this machine.",
            "64 images is the time of the vision tower, which runs once per image. The paper's Figure 1 shows it.",
        ),
    )

    def measure(variant: Variant) -> Values:
        recalls, bundle = _r1(study, variant), study.pretrained(variant)
        shape = study.command("show", "model", "show", bundle)[1].get("block_shape")
        scored = next(iter(_rerank(study, bundle).get("joint_encoders", {}).values()), None)
        own = (
            None if shape is None else 2 * shape[0] * shape[1] / 1000,
            None if scored is None else scored["parameters"] / 1e6,
            None if scored is None else _BATCH / next(iter(scored["median"].values())) * 1e3,
            _vision_milliseconds(study, bundle),
        )
        return {**recalls, **dict(zip(costs, own, strict=True))}

    for label, variant, paper in (
        ("Local, ViT-B/16", replace(LOCAL, tower="siglip2-b16-384"), (84.3, 94.3, 60.9, 76.1, 442, 33, 2.86)),
        ("Local, ViT-L/16", LOCAL, (87.8, 96.5, 64.9, 81.0, 442, 33, 4.14)),
        ("Compressed-128, ViT-L/16", Variant(tokens=128), (87.1, 96.3, 64.6, 81.0, 98, 33, 2.04)),
        ("Compressed-64, ViT-L/16", _COMPRESSED, (86.9, 96.4, 64.6, 80.9, 49, 33, 1.91)),
    ):
        table.add(label, dict(zip(table.columns, paper, strict=False)), measure, variant)
    return table


def zero_shot(study: Study) -> Table:
    """Zero-shot recall on Flickr30k, for seven pairs of towers."""
    table = Table("Zero-shot retrieval on Flickr30k, in percent", "Table 1", _RECALLS)
    for tower, (title, embeddings, reranked) in _ZERO_SHOT.items():
        variant = replace(LOCAL, tower=tower)
        for kind, paper, pool in (("embeddings", embeddings, None), ("re-ranked", reranked, POOL)):
            table.add(f"{title}: {kind}", dict(zip(_RECALLS, paper, strict=True)), _recalls, study, variant, pool)
    return table


def tokens(study: Study) -> Table:
    """Recall by number of stored tokens per image."""
    table = Table(
        "Recall by number of tokens, in percent", "Figure: retrieval performance vs. number of tokens", _RECALLS
    )
    paper = {64: {"T2I R@1": 86.9, "I2T R@1": 96.4}, 128: {"T2I R@1": 87.1, "I2T R@1": 96.3}}
    for count in (32, 64, 128, 256):
        table.add(f"{count} tokens", paper.get(count), _recalls, study, Variant(tokens=count))
    table.add("local", _LOCAL_RECALLS, _recalls, study, LOCAL)
    return table


def pool_size(study: Study) -> Table:
    """Recall by number of candidates that are re-ranked."""
    table = Table("Recall by pool size, in percent", "Figure: retrieval performance vs. re-ranking pool size", _RECALLS)
    for name, variant in (("local", LOCAL), ("64 tokens", _COMPRESSED)):
        for pool in _POOLS:
            paper = _LOCAL_RECALLS if (variant, pool) == (LOCAL, POOL) else None
            table.add(f"{name}, pool {pool}", paper, _recalls, study, variant, pool, _POOLS)
    return table


def objectives(study: Study) -> Table:
    """Recall of the local model, by training objective."""
    table = Table(
        "Training objectives, R@1 in percent",
        "Table: ablation on training objectives",
        ("T2I R@1",),
        notes=("The paper calls text-embedding recovery ITC in this table.",),
    )
    no_mlm, no_recovery = "objective.mlm_weight=0", "objective.recovery_weight=0"
    for label, settings, paper in (
        ("matching", (no_mlm, no_recovery), 82.3),
        ("matching, masked words", (no_recovery,), 85.5),
        ("matching, masked words, recovery", (), 87.8),
    ):
        table.add(label, {"T2I R@1": paper}, _t2i, study, replace(LOCAL, settings=settings))
    return table


def distillation(study: Study) -> Table:
    """Recall of the compressed model, with and without distillation from the local model."""
    table = Table("Distillation with 64 tokens, R@1 in percent", "Table: effect of distillation", ("T2I R@1",))
    for label, distilled, paper in (("without", False, 83.8), ("with", True, 86.9)):
        table.add(label, {"T2I R@1": paper}, _t2i, study, Variant(distilled=distilled))
    return table


def adapters(study: Study) -> Table:
    """Recall by adapter, with 64 tokens per image."""
    table = Table("Token compression, R@1 in percent", "Table: comparison of token-compression strategies", _R1)

    def embeddings() -> Values:
        recall = study.recall(study.pretrained(_COMPRESSED), "flickr")
        return {f"Flickr {direction}": recall.at(direction.lower(), 1, None) for direction in _DIRECTIONS}

    table.add("embeddings alone", {"Flickr T2I": 82.3, "Flickr I2T": 94.8}, embeddings)
    for adapter, paper in {
        "strided": (83.24, 94.1, 60.09, 77.2),
        "clustered": (85.66, 96.1, 63.31, 79.76),
        "pruned": (82.4, 93.7, 58.6, 76.4),
        "compressed": (86.9, 96.4, 64.6, 80.9),
    }.items():
        table.add(adapter, dict(zip(_R1, paper, strict=True)), _r1, study, Variant(adapter=adapter))
    return table


def language_model(study: Study) -> Table:
    """Recall by language model: MiniLM or BERT-Base."""
    table = Table(
        "Language model, in percent",
        "Table: MiniLM and BERT-Base",
        _RECALLS,
        notes=(
            "The text of the paper names the compressed model, but the MiniLM row has the values of the local model.",
        ),
    )
    for language, paper in {
        "minilm-l12": (84.3, 96.6, 97.9, 94.3, 99.9, 99.9),
        "bert-base": (84.52, 96.58, 97.9, 93.9, 99.9, 99.9),
    }.items():
        variant = replace(LOCAL, tower="siglip2-b16-384", language=language)
        table.add(language, dict(zip(_RECALLS, paper, strict=True)), _recalls, study, variant)
    return table


def mining(study: Study) -> Table:
    """Recall if the hard negatives are mined with other towers."""
    table = Table("Mining with another model, R@1 in percent", "Tables: cross-model negative mining", _R1)
    clip, siglip = "clip-l14-336", "siglip2-l16-384"
    for tower, miner, paper in (
        (clip, None, (81.9, 93.8, 54.6, 70.7)),
        (clip, siglip, (81.8, 93.5, 54.6, 70.8)),
        (siglip, None, (87.8, 96.5, 64.9, 81.0)),
        (siglip, clip, (81.5, 93.0, 58.9, 74.48)),
    ):
        label = tower if miner is None else f"{tower}, mined by {miner}"
        variant = replace(LOCAL, tower=tower, miner=miner)
        table.add(label, dict(zip(_R1, paper, strict=True)), _r1, study, variant)
    return table


def quantization(study: Study) -> Table:
    """Recall by precision of the stored tokens, for the local and the compressed model."""
    columns = ("T2I R@1", "kB per image")
    table = Table(
        "Precision of the stored tokens", "Figure: recall against storage size, with numbers only for BF16", columns
    )

    def measure(variant: Variant, precision: str) -> Values:
        options = [word for name in _PRECISIONS for word in ("--precision", name)]
        recall = study.recall(study.pretrained(variant), "flickr", (10,), *options, "--direction", "t2i")
        results = (each for each in recall.report.get("results", ()) if each.get("precision") == precision)
        size = next((each["bytes_per_image"] / 1000 for each in results), None)
        return {"T2I R@1": recall.at("t2i", 1, 10, precision), "kB per image": size}

    for name, variant, paper in (("local", LOCAL, (87.8, 442.0)), ("64 tokens", _COMPRESSED, (86.9, 49.0))):
        for precision in _PRECISIONS:
            published = dict(zip(columns, paper, strict=True)) if precision == "bf16" else None
            table.add(f"{name}, {precision}", published, measure, variant, precision)
    return table


def alignment(study: Study) -> Table:
    """Alignment of caption words and image tokens, for the local and the compressed model."""
    columns = ("mean", "standard deviation", "effect size")
    table = Table("Alignment score S of captions and tokens", "Figure: distribution of alignment scores", columns)

    def measure(key: str) -> Values:
        local, compressed = (study.index(study.pretrained(variant), "flickr") for variant in (LOCAL, _COMPRESSED))
        captions = study.data.benchmark("flickr")
        options = ["--captions", captions.files[0], "--images", captions.images, "--against", compressed]
        options += ["--split", captions.split] if captions.split else []
        report = study.command("explain", "explain", local, *options, "--out", "{out}/explain.html")[1]
        if not report:
            return {}
        scores = report["alignment"][key]
        own = {"mean": scores["mean"], "standard deviation": scores["deviation"]}
        return own | ({"effect size": report["alignment"]["test"]["effect_size"]} if key == "second" else {})

    table.add("576 tokens", {"mean": 0.2404, "standard deviation": 0.0405}, measure, "first")
    paper = {"mean": 0.2516, "standard deviation": 0.0491, "effect size": 0.39}
    table.add("64 tokens", paper, measure, "second")
    return table


def full_dataset(study: Study) -> Table:
    """Recall at 5, 10 and 20 if all images and captions of a dataset are candidates."""
    table = Table("Full-dataset retrieval, in percent", "Tables: Flickr Full and COCO Full, pool 100", _FULL_RECALLS)

    def measure(name: str) -> Values:
        bundle = study.pretrained(LOCAL) if name == "flickr" else study.finetuned(LOCAL)
        return _by_column(study.recall(bundle, name, (100,), full=True), _FULL_CUTOFFS, 100)

    for name, paper in {
        "flickr": (78.32, 84.54, 89.58, 92.4, 95.9, 97.7),
        "coco": (52.23, 60.55, 68.08, 69.86, 76.96, 82.64),
    }.items():
        table.add(name, dict(zip(_FULL_RECALLS, paper, strict=True)), measure, name)
    return table


def io_test(study: Study) -> Table:
    """Time to fetch half of the blocks of an index, in contiguous and in random order."""
    table = Table(
        "Fetching half of the blocks of an index",
        "Section: Token-Fetch I/O Considerations",
        ("GB/s, contiguous", "GB/s, random"),
        notes=(
            "The paper read 50,000 of 100,000 blocks through a memory-mapped NumPy array on a PCIe 4.0 disk, and does "
            "not say whether the page cache was empty. Our runs start with an empty page cache, and "
            "decode blocks to BF16.",
        ),
    )
    rows = study.data.fetch_rows

    def measure() -> Values:
        options = ["--synthetic", rows, "--pool", rows // 2, "--precision", "bf16", "--cold", "--repeats", 3]
        report = study.command("fetch", "bench", "fetch", *options, "--scratch", study.folder)[1]
        sections = report["precisions"]["bf16"]["sections"] if report else {}
        return {
            f"GB/s, {pattern}": sections[f"cold {pattern}"]["entries"]["edje"]["summary"]["gb_per_s"]
            for pattern in ("contiguous", "random")
            if sections
        }

    paper = {"GB/s, contiguous": 2.46 / 0.39, "GB/s, random": 2.46 / 0.59}
    table.add(f"{rows:,} images of 64 x 384", paper, measure)
    return table


def time_breakdown(study: Study) -> Table:
    """Time of each stage of a query. The vision tower is timed too, but does not run during a query."""
    table = Table(
        "Time of a query of 64 candidates",
        "Figure 1 (a), without numbers",
        (*(f"{stage}, ms" for stage in _STAGES), "vision tower, ms"),
        notes=("A joint encoder without stored tokens would run the vision tower on all candidates of every query.",),
    )

    def measure(variant: Variant) -> Values:
        bundle = study.pretrained(variant)
        report = _rerank(study, bundle, "--index", study.index(bundle, "flickr"), "--pool", _BATCH)
        query = report.get("query", {"ms": {}})
        own = {f"{stage}, ms": query["ms"].get(stage) for stage in _STAGES}
        return {**own, "vision tower, ms": _vision_milliseconds(study, bundle)}

    for name, variant in (("local", LOCAL), ("64 tokens", _COMPRESSED)):
        table.add(name, None, measure, variant)
    return table


def _by_column(recall: Recall, cutoffs: Sequence[int], pool: int | None) -> dict[str, float | None]:
    """Return the recalls of both directions by column name."""
    return {
        f"{direction} R@{cutoff}": recall.at(direction.lower(), cutoff, pool)
        for direction in _DIRECTIONS
        for cutoff in cutoffs
    }


def _recalls(study: Study, variant: Variant, pool: int | None = POOL, pools: Sequence[int] = (POOL,)) -> Values:
    """Return the recalls on Flickr30k after the first training phase. None as `pool` evaluates embeddings alone."""
    return _by_column(study.recall(study.pretrained(variant), "flickr", pools), _CUTOFFS, pool)


def _r1(study: Study, variant: Variant) -> dict[str, float | None]:
    """Return R@1 of both directions: on Flickr30k after the first training phase, on COCO after the second phase."""
    flickr = study.recall(study.pretrained(variant), "flickr")
    coco = study.recall(study.finetuned(variant), "coco")
    of_data = (("Flickr", flickr), ("COCO", coco))
    return {f"{name} {each}": recall.at(each.lower(), 1) for name, recall in of_data for each in _DIRECTIONS}


def _t2i(study: Study, variant: Variant) -> Values:
    return {"T2I R@1": study.recall(study.pretrained(variant), "flickr").at("t2i", 1)}


def _rerank(study: Study, bundle: Path, *options: object) -> dict[str, Any]:
    command = ["bench", "rerank", "--model", bundle, "--batch-size", _BATCH, "--threads", usable_cpus(), "--repeats", 3]
    return study.command("rerank", *command, *options)[1]


def _vision_milliseconds(study: Study, bundle: Path) -> float | None:
    """Return the median milliseconds of vision tower and adapter for 64 images; None if commands are only listed."""

    def measure() -> dict[str, Any]:
        import torch
        from PIL import Image

        from edje_index.indexing.image_encoder import ImageEncoder

        encoder = ImageEncoder.open(bundle)
        pixels = torch.stack([encoder.preprocess(Image.new("RGB", (640, 480), "grey"))] * _BATCH)
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            encoder.encode(pixels)
            seconds.append(time.perf_counter() - started)
        return {"milliseconds": statistics.median(seconds[1:]) * 1e3, "device": str(encoder.device)}

    return study.measure("vision-time", [bundle, _BATCH], measure).get("milliseconds")


EXPERIMENTS: Mapping[str, Callable[[Study], Table]] = {
    "prior-art": prior_art,
    "zero-shot": zero_shot,
    "tokens": tokens,
    "pool-size": pool_size,
    "objectives": objectives,
    "distillation": distillation,
    "adapters": adapters,
    "language-model": language_model,
    "mining": mining,
    "quantization": quantization,
    "alignment": alignment,
    "full-dataset": full_dataset,
    "io-test": io_test,
    "time-breakdown": time_breakdown,
}
"""The experiments of `bench paper`, by name."""


def run_experiments(
    names: Sequence[str], say: Say, *, data: Path, out: Path, model: Path | None, config: Path | None, listing: bool
) -> dict[str, Table]:
    """Run experiments and write their tables to `out`. Return the tables by name.

    Args:
        names: keys of `EXPERIMENTS`.
        say: receives one line of text per step.
        data: directory of the data, see `benchmarks.paper.data`.
        out: directory for models, indexes and tables.
        model: bundle with the towers for the small data; None for the full data.
        config: TOML file with settings for all training runs.
        listing: True to print the remaining commands instead of running them.
    """
    options = () if config is None else ("--config", str(config.absolute()))
    source: FullData | SmallData = FullData(data.absolute(), options)
    if model is not None:
        small = tuple(word for setting in SMALL_MODEL for word in ("--set", setting))
        source = SmallData(data.absolute(), model.absolute(), out.absolute() / "captions", (*small, *options))
    study = Study(source, out.absolute() / "steps", say, listing)
    tables = {name: EXPERIMENTS[name](study) for name in names}
    if not listing:
        for name, table in tables.items():
            write_bytes_atomic(out / f"{name}.md", "\n".join([*table.lines(), ""]).encode())
    return tables
