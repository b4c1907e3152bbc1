"""The requests for a build and for changes that add rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_SIZE = 1024
BATCH_SIZE = 32


@dataclass(frozen=True)
class BuildConfig:
    """A request to build an index.

    Attributes:
        sources: directories, tar archives, lists of paths or image files, in row order.
        out: directory of the new or unfinished index.
        model: directory of the model bundle.
        engine: "ray" or "inline".
        workers: number of worker processes; None derives the number from the hardware.
        threads: CPU threads per worker; None keeps the value of an unfinished index, or derives the number from the
            hardware.
        shard_size: rows per shard.
        batch_size: images per forward pass.
        device: device of the encoder: "auto", "cpu" or "cuda".
        dtype: data type of the encoder's matrix products: "auto", "float32" or "bfloat16".
        precisions: precisions of the stored tokens.
        dedupe: whether to encode byte-identical inputs only once.
        column: path column of all lists of paths; None selects the first column with a name in
            `pipelines.sources.path_list.PATH_COLUMNS`.
        max_pixels: largest number of pixels of an image; larger images become failed rows. None selects
            `edje_index.images.decode.DEFAULT_MAX_PIXELS`.
        max_failed: share of the inputs that may fail, 0 to 1. If more inputs fail, the build ends with an error. None
            allows 1 % of the inputs or 20 inputs, whichever is more.
        address: address of the Ray cluster to join; None starts Ray on this machine.

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
        sources: see `BuildConfig`.
        model: directory of the model bundle; None selects the bundle that built the index.
        engine, workers, address, column, max_failed: see `BuildConfig`.
    """

    root: Path
    sources: tuple[str, ...]
    model: Path | None = None
    engine: str = "ray"
    workers: int | None = None
    address: str | None = None
    column: str | None = None
    max_failed: float | None = None


@dataclass(frozen=True)
class UpdateConfig(AppendConfig):
    """A request to make an index equal to its sources. The other attributes are those of `AppendConfig`.

    Attributes:
        sources: all sources of the index; empty means the sources that the index records.
        max_vanished: share of the rows that may have no input any more, 0 to 1. If more rows vanished, the update ends
            with an error.
        dry_run: whether to compare only, and to change nothing.
    """

    sources: tuple[str, ...] = ()
    max_vanished: float = 0.5
    dry_run: bool = False
