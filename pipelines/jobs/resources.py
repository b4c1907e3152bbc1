"""The memory, disk space and devices of this machine, and those that a change of an index needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.environment import available_memory, cuda_devices, free_disk
from pipelines.progress.wording import counted, human_bytes
from storage_formats.cpus import usable_cpus
from storage_formats.errors import UsageError
from storage_formats.format.layout import CRC_BYTES, PAGE_BYTES, IndexSpec, padded_shard_bytes

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from pipelines.jobs.plan import BuildSettings
    from storage_formats.format.manifest import Manifest

_ANN = "nearest-neighbour index"
_SLACK = 1.02  # metadata, and what the file system adds
_FILES_PER_SHARD = 5  # tokens, checksums, embeddings, rows; during the build also the receipt
_ROW_BYTES = 200  # rows table and frozen inputs together, compressed, for paths of about 60 characters
_PROCESS_BYTES = 600 * 2**20  # torch, open_clip and their libraries
_BATCHES_IN_MEMORY = 4  # being decoded, ready, and in the model
_CHANNELS = 3
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Need:
    """The required memory or disk space in bytes, by purpose."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Number of bytes for all purposes together."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.parts.items())
        return f"{human_bytes(self.total)} ({parts})"


def usable_memory(limit: int | None) -> int:
    """Return the free memory of this machine in bytes, or `limit` if it is smaller. None is no limit."""
    free = available_memory()
    return free if limit is None else min(free, limit)


def check_workers(
    settings: BuildSettings,
    info: BundleInfo,
    *,
    engine: str,
    workers: int | None,
    address: str | None,
    memory: int | None,
) -> int | None:
    """Check the device and the memory. Return the number of worker processes; None lets the Ray cluster choose it.

    If `workers` is None, this is the number of GPUs, or that of CPUs divided by the threads of a worker, but at most as
    many as the memory has room for.

    Raises:
        UsageError: this machine lacks the device or the memory for the workers, or the model cannot encode clips.
        MissingExtraError: the model is to encode clips, but PyAV is not installed.
    """
    if settings.frames is not None:
        _check_clips(info)
    if engine != "inline" and address is not None:
        return workers
    if settings.device == "cuda" and not cuda_devices():
        raise UsageError(
            "the device is cuda, but torch finds no CUDA device on this machine; use the device cpu", parameter="device"
        )
    if engine == "inline":
        workers = 1
    elif workers is None:
        wanted = cuda_devices() if settings.device == "cuda" else usable_cpus() // settings.threads
        worker_bytes = model_memory_need(1, settings, info).total
        workers = max(1, min(wanted, usable_memory(memory) // worker_bytes))
    need = model_memory_need(workers, settings, info)
    _check_memory(need, memory, "use fewer workers or a smaller batch size", parameter="workers")
    return workers


def model_memory_need(workers: int | None, settings: BuildSettings, info: BundleInfo) -> Need:
    """Return a lower bound of the memory that all workers need together. If `workers` is None, assume one worker."""
    height, width = info.vision["image_size"]
    images = max(settings.batch_size, settings.frames or 1)
    return worker_memory_need(workers or 1, info.encoder_weights_bytes, images, int(height) * int(width))


def check_index_size(root: Path, spec: IndexSpec, memory: int | None = None) -> None:
    """Raise UsageError if the disk is too small for the index, or the memory for its nearest-neighbour index.

    For the arguments, see `check_ann_memory` and `check_disk`.
    """
    check_ann_memory(spec, memory)
    check_disk(root, spec, memory)


def check_ann_memory(spec: IndexSpec, memory: int | None) -> None:
    """Raise UsageError if the memory is too small to build the nearest-neighbour index.

    Args:
        spec: shape of the index.
        memory: see `pipelines.build_index`.
    """
    from edje_index.indexing.ann_kind import AnnKind

    need = AnnKind.choose(spec.rows, spec.embed_dim, memory).build_bytes(spec.rows, spec.embed_dim)
    advice = "split the sources over several indexes"
    _check_memory(Need({_ANN: need}), memory, advice, parameter="sources")


def check_extension_memory(manifest: Manifest, rows: int, memory: int | None) -> None:
    """Raise UsageError if the memory is too small to add `rows` rows to the nearest-neighbour index.

    `pipelines.build_index` describes `memory`.
    """
    from edje_index.indexing.ann_kind import extension_bytes

    need = extension_bytes(manifest.ann, rows, manifest.spec.embed_dim, memory)
    _check_memory(Need({_ANN: need}), memory, "split the index", parameter="sources")


def check_disk(root: Path, spec: IndexSpec, memory: int | None = None) -> None:
    """Raise UsageError if the disk is too small for the index.

    Args:
        root: directory of the index.
        spec: shape of the index.
        memory: see `pipelines.build_index`.
    """
    need = disk_need(spec, memory)
    free = free_disk(root)
    if need.total > free:
        raise UsageError(
            f"the index of {counted(spec.rows, 'input')} needs {need} of disk, but only "
            f"{human_bytes(free)} are free at {root}; free some space, or choose an output directory on "
            "another disk",
            parameter="out",
        )


def disk_need(spec: IndexSpec, memory: int | None = None) -> Need:
    """Return the disk space that the whole index needs, plus 2 %."""
    from edje_index.indexing.ann_kind import ann_bytes
    from storage_formats.codecs import codec

    tokens = sum(_token_bytes(spec, codec(name, spec.block_shape).record_bytes) for name in spec.precisions)
    embeddings = spec.shards * spec.shard_size * spec.embed_dim * _FLOAT32_BYTES
    rows = spec.rows * _ROW_BYTES + spec.shards * _FILES_PER_SHARD * PAGE_BYTES  # files end in a partial disk block
    ann = ann_bytes(spec.rows, spec.embed_dim, memory)
    parts = {"tokens": tokens, "embeddings": embeddings, "rows": rows, "ann": ann}
    return Need({name: int(size * _SLACK) for name, size in parts.items()})


def worker_memory_need(workers: int, weights_bytes: int, batch_size: int, image_pixels: int) -> Need:
    """Return a lower bound of the memory that all workers need together."""
    batches = _BATCHES_IN_MEMORY * batch_size * _CHANNELS * image_pixels * _FLOAT32_BYTES
    parts = {"libraries": _PROCESS_BYTES, "weights": weights_bytes, "batches": batches}
    return Need({name: workers * size for name, size in parts.items()})


def _token_bytes(spec: IndexSpec, record_bytes: int) -> int:
    last = len(spec.shard_rows(spec.shards - 1))
    full_shard, last_shard = (
        padded_shard_bytes(rows, spec.shard_size, record_bytes)[1] for rows in (spec.shard_size, last)
    )
    return (spec.shards - 1) * full_shard + last_shard + spec.rows * CRC_BYTES


def _check_clips(info: BundleInfo) -> None:
    """Check that clips can be decoded, and that the adapter can combine their frames."""
    from storage_formats.extras import name_missing_extra

    with name_missing_extra("video"):
        import av  # noqa: F401
    if not info.combines_frames:
        raise UsageError(
            f"the bundle {info.path} has a {info.adapter['kind']} adapter, which cannot combine the frames of clips; "
            "use a bundle with a compressed adapter",
            parameter="model",
        )


def _check_memory(need: Need, limit: int | None, advice: str, *, parameter: str) -> None:
    available = usable_memory(limit)
    if need.total > available:
        state = "free"
        if available == limit:
            state, advice, parameter = "allowed", f"allow more, or {advice}", "memory"
        raise UsageError(
            f"the build needs at least {need} of memory, but only {human_bytes(available)} are {state}; {advice}",
            parameter=parameter,
        )
