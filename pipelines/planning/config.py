"""What a build was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_SIZE = 1024
BATCH_SIZE = 32


@dataclass(frozen=True)
class BuildConfig:
    """A request to build an index.

    Attributes:
        sources: folders, tars, lists or image files, in the order of the rows.
        out: the index's folder.
        model: folder of the model bundle.
        engine: "ray" or "inline".
        workers: processes that hold a model; None chooses by the machine.
        threads: CPU threads of a worker's model; None chooses by the machine, or takes those of the begun index.
        shard_size: rows a shard.
        batch_size: images a forward pass.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32" or "bfloat16".
        precisions: token arrays to write.
        dedupe: encode byte-identical inputs once.
        column: column of paths in a list, where it is not a usual name.
        max_pixels: larger images become failed rows; None is `edje_index.images.decode.DEFAULT_MAX_PIXELS`.
        address: Ray cluster to join; None starts Ray on this machine.
    """

    sources: tuple[str, ...]
    out: Path
    model: Path
    engine: str = "ray"
    workers: int | None = None
    threads: int | None = None
    shard_size: int = SHARD_SIZE
    batch_size: int = BATCH_SIZE
    device: str = "auto"
    dtype: str = "auto"
    precisions: tuple[str, ...] = ("bf16",)
    dedupe: bool = False
    column: str | None = None
    max_pixels: int | None = None
    address: str | None = None
