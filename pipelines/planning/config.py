"""Requests for builds, appends and updates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edje_index.models import MAX_FRAMES
from storage_formats.errors import UsageError

SHARD_SIZE = 1024


@dataclass(frozen=True)
class BuildConfig:
    """A request to build an index.

    Attributes:
        sources: directories, tar archives, lists of paths or image files, in row order.
        out: directory of the new or unfinished index.
        model: directory of the model bundle.
        engine: "ray" or "inline".
        workers: number of worker processes; None derives the number from the hardware.
        threads: number of CPU threads per worker; None derives the number from the hardware. A resumed build keeps the
            number of the first run.
        shard_size: number of rows per shard.
        batch_size: number of images per forward pass; None is 8 on a CPU and 32 on cuda. A resumed build keeps the
            number of the first run.
        device: device of the encoder: "auto", "cpu" or "cuda".
        dtype: data type of the encoder's matrix products: "float32", "bfloat16" or "auto". "auto" is bfloat16 on cuda,
            and on a CPU if the CPU of the process that plans the build has bfloat16 instructions. None is bfloat16 on
            cuda and float32 on every CPU. A resumed build keeps the type of the first run.
        precisions: precisions of the stored tokens.
        dedupe: True to encode byte-identical inputs only once.
        column: name of the path column in lists of paths; None selects the first column with a name in
            `pipelines.sources.path_list.PATH_COLUMNS`.
        max_pixels: maximum number of pixels of an image; larger images become failed rows. None selects
            `edje_index.images.decode.DEFAULT_MAX_PIXELS`.
        truncated: "fail" makes a truncated image a failed row. "load" indexes the readable part of the image.
        frames: number of frames per clip. Video files are then inputs, too. None indexes images only.
        max_failed: maximum share of failed inputs, 0 to 1. If more inputs fail, the build ends with an error. None
            allows 1 % of the inputs, but at least 20 inputs.
        address: address of the Ray cluster to join; None starts Ray on this machine.
        memory: memory in bytes that the workers on this machine and the nearest-neighbour index may need; None is the
            free memory. The build is planned for this limit, which the operating system does not enforce. The kind of
            nearest-neighbour index depends on the limit. The tokens do not.

    Raises:
        UsageError: a precision does not exist, the batch size is below 1, or the number of frames is not between 1 and
            `MAX_FRAMES`.
    """

    sources: tuple[str, ...]
    out: Path
    model: Path
    engine: str = "ray"
    workers: int | None = None
    threads: int | None = None
    shard_size: int = SHARD_SIZE
    batch_size: int | None = None
    device: str = "auto"
    dtype: str | None = None
    precisions: tuple[str, ...] = ("bf16",)
    dedupe: bool = False
    column: str | None = None
    max_pixels: int | None = None
    truncated: str = "fail"
    frames: int | None = None
    max_failed: float | None = None
    address: str | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        from storage_formats.codecs import codec

        for name in self.precisions:
            codec(name)
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(
                f"a batch of {self.batch_size} images is not possible; give 1 or more", parameter="batch_size"
            )
        if self.frames is not None and not 1 <= self.frames <= MAX_FRAMES:
            raise UsageError(
                f"{self.frames} frames per clip are not allowed; give a number from 1 to {MAX_FRAMES}",
                parameter="frames",
            )


@dataclass(frozen=True)
class AppendConfig:
    """A request to append rows to an index.

    Attributes:
        root: directory of the index.
        sources: see `BuildConfig`.
        model: directory of the model bundle; None selects the bundle that built the index.
        engine, workers, address, column, max_failed, memory: see `BuildConfig`.
    """

    root: Path
    sources: tuple[str, ...]
    model: Path | None = None
    engine: str = "ray"
    workers: int | None = None
    address: str | None = None
    column: str | None = None
    max_failed: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class UpdateConfig(AppendConfig):
    """A request to update an index from its sources. `AppendConfig` describes the inherited attributes.

    Attributes:
        sources: all sources of the index; if empty, the sources recorded in the index are used.
        max_vanished: maximum share of rows whose input no longer exists, 0 to 1. If the share is larger, the update
            ends with an error.
        dry_run: True to compare the sources with the index without changing the index.
    """

    sources: tuple[str, ...] = ()
    max_vanished: float = 0.5
    dry_run: bool = False
