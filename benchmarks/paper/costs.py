"""Costs in the EDJE paper: storage, parameters, time, and the fetching of tokens."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.paper.study import LOCAL, Study, Variant
from benchmarks.paper.tables import Table, Values
from storage_formats.cpus import usable_cpus

_BATCH = 64  # pairs and images per timed batch, as in the paper
_STAGES = ("text", "nearest", "fetch", "score")


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
    rows = study.data.budget.fetch_rows

    def measure() -> Values:
        options = ["--synthetic", rows, "--pool", rows // 2, "--precision", "bf16", "--cold", "--repeats", 3]
        report = study.steps.command("fetch", "bench", "fetch", *options, "--scratch", study.steps.folder).report
        return _fetch_rates(report)

    table.add(f"{rows:,} images of 64 x 384", measure, {"GB/s, contiguous": 2.46 / 0.39, "GB/s, random": 2.46 / 0.59})
    return table


def time_breakdown(study: Study) -> Table:
    """Time of each stage of a query. The vision tower is timed too, but does not run during a query."""
    table = Table(
        "Time of a query of 64 candidates",
        "Figure 1 (a), without numbers",
        (*(f"{stage}, ms" for stage in _STAGES), "vision tower, ms"),
        notes=("A joint encoder without stored tokens would run the vision tower on all candidates of every query.",),
    )
    for name, variant in (("local", LOCAL), ("64 tokens", Variant())):
        table.add(name, partial(_stage_times, study, variant))
    return table


def joint_parameters(study: Study, bundle: Path) -> float | None:
    """Return the number of parameters of the joint encoder in millions; None if commands are only listed."""
    counts = _rerank_report(study, bundle).get("joint_encoders", {}).values()
    return next((model["parameters"] / 1e6 for model in counts), None)


def batch_milliseconds(study: Study, bundle: Path) -> float | None:
    """Return the median milliseconds for scoring 64 pairs; None if commands are only listed."""
    for model in _rerank_report(study, bundle).get("joint_encoders", {}).values():
        return _BATCH / float(next(iter(model["median"].values()))) * 1e3
    return None


def embedding_milliseconds(study: Study, bundle: Path) -> float | None:
    """Return the median milliseconds of vision tower and adapter for 64 images; None if commands are only listed."""
    report = study.steps.measure("vision-time", [bundle, _BATCH], lambda: _vision_time(bundle)).report
    return report.get("milliseconds")


def _stage_times(study: Study, variant: Variant) -> Values:
    bundle = study.pretrained(variant)
    index = study.index(bundle, "flickr")
    query = _rerank_report(study, bundle, "--index", index, "--pool", _BATCH).get("query", {"ms": {}})
    own = {f"{stage}, ms": query["ms"].get(stage) for stage in _STAGES}
    return {**own, "vision tower, ms": embedding_milliseconds(study, bundle)}


def _rerank_report(study: Study, bundle: Path, *options: object) -> dict[str, Any]:
    command = ["bench", "rerank", "--model", bundle, "--batch-size", _BATCH, "--threads", usable_cpus(), "--repeats", 3]
    return study.steps.command("rerank", *command, *options).report


def _vision_time(bundle: Path) -> dict[str, Any]:
    import torch
    from PIL import Image

    from edje_index.indexing.image_encoder import ImageEncoder

    encoder = ImageEncoder.open(bundle)
    image = Image.new("RGB", (640, 480), "grey")
    pixels = torch.stack([encoder.preprocess(image)] * _BATCH)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        encoder.encode(pixels)
        seconds.append(time.perf_counter() - started)
    return {"milliseconds": statistics.median(seconds[1:]) * 1e3, "device": str(encoder.device)}


def _fetch_rates(report: dict[str, Any]) -> Values:
    sections = report.get("precisions", {}).get("bf16", {}).get("sections", {})
    return {
        f"GB/s, {pattern}": sections[f"cold {pattern}"]["entries"]["edje"]["summary"]["gb_per_s"]
        for pattern in ("contiguous", "random")
        if f"cold {pattern}" in sections
    }
