"""The requests for a build and for an append."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_SIZE = 1024
BATCH_SIZE = 32


@dataclass(frozen=True)
class BuildConfig:
    """A request to build an index.

    Attributes:
        sources: directories, tar archives, lists or image files. Their order is the order of the rows.
        out: directory of the index.
        model: directory of the model bundle.
        engine: "ray" or "inline".
        workers: worker processes; None chooses by the machine.
        threads: CPU threads per worker; None chooses by the machine, or keeps the value of an unfinished index.
        shard_size: rows per shard.
        batch_size: images per forward pass.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32" or "bfloat16".
        precisions: precisions of the stored tokens.
        dedupe: encode byte-identical inputs once.
        column: path column of a list; None takes the first column with a usual name.
        max_pixels: images with more pixels become failed rows; None is `edje_index.images.decode.DEFAULT_MAX_PIXELS`.
        max_failed: share of the inputs that may fail; with more, the build ends. None allows 1 %, and 20 inputs in any
            case.
        address: Ray cluster to join; None starts Ray on this machine.

    Raises:
        UsageError: a precision does not exist.
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
    max_failed: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        from storage_formats.codecs import codec

        for name in self.precisions:
            codec(name)


@dataclass(frozen=True)
class AppendConfig:
    """A request to append rows to an index.

    Attributes:
        root: directory of the index.
        sources: as for a build.
        model: directory of the model bundle; None takes the one that built the index.
        engine, workers, address, column, max_failed: as for a build.
    """

    root: Path
    sources: tuple[str, ...]
    model: Path | None = None
    engine: str = "ray"
    workers: int | None = None
    address: str | None = None
    column: str | None = None
    max_failed: float | None = None
