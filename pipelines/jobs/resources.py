"""Estimates and checks the memory and the disk space that a build, an append or an
update needs, and chooses the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edje_index.bundles.info import BundleInfo
from edje_index.indexing.faiss_index import AnnKind
from pipelines.environment import cuda_devices, free_disk
from pipelines.jobs.plan import SHARDS_PER_GPU, BuildSettings
from pipelines.progress.wording import counted, human_bytes
from storage_formats.arguments import as_number, optional_count
from storage_formats.cgroups import available_memory
from storage_formats.codecs import codec
from storage_formats.errors import UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.layout import (
    CRC_BYTES,
    PAGE_BYTES,
    IndexSpec,
    padded_shard_bytes,
)
from storage_formats.format.places import Place
from storage_formats.threads import usable_cpus

Need = dict[str, int]
"""The required memory or disk space in bytes, by purpose."""

_ANN = "nearest-neighbour index"
# This factor adds 2 % for metadata files and for the overhead of the file system.
_SLACK = 1.02
# The files of a shard: tokens of one precision, checksums, embeddings, rows, and during
# the build the receipt
_FILES_PER_SHARD = 5
# Bytes that a row takes in the compressed rows file and input list together, if paths
# have about 60 characters
_ROW_BYTES = 200
# Bytes of memory that torch, open_clip and their libraries take in a worker process
_PROCESS_BYTES = 600 * 2**20
# Bytes of memory per colour value of a batch. Four batches wait with 1 byte per value,
# and one batch is in the model with 4 bytes per value (float32).
_BYTES_PER_VALUE = 8
_CHANNELS = 3
_FLOAT32_BYTES = 4


class ResourcesError(UsageError):
    """The disk or the memory is too small for the request."""


def described(need: Need) -> str:
    """Return a text with the total of a need, followed by its parts in parentheses."""
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in need.items())
    return f"{human_bytes(sum(need.values()))} ({parts})"


def usable_memory(limit: int | None) -> int:
    """Return the free memory of this machine in bytes, but at most `limit`. None means
    no limit.
    """
    free = available_memory()
    return free if limit is None else min(free, limit)


@dataclass(frozen=True)
class Execution:
    """How new rows are encoded: the arguments of `pipelines.build_index` that do not
    affect the stored tokens.

    Raises:
        UsageError: a number is out of range.
    """

    engine: str
    workers: int | None = None
    helpers: int | None = None
    address: str | None = None
    memory: int | None = None
    max_failed: float | None = None

    def __post_init__(self) -> None:
        optional_count(self.workers, "workers")
        optional_count(self.memory, "memory")
        if self.max_failed is not None:
            as_number(self.max_failed, "max_failed", most=1)


def choose_workers(
    settings: BuildSettings,
    info: BundleInfo,
    execution: Execution,
) -> Execution:
    """Check that engine, device and memory suffice. Return `execution` with the number
    of workers.

    If `execution` names a Ray cluster, `execution` is returned unchanged, and the
    cluster chooses the number if `workers` is None. Without a cluster, None is replaced
    by twice the number of GPUs if the device is cuda, and otherwise by the number of
    CPUs divided by the number of threads of a worker. The number is smaller if the
    memory has room for fewer workers. The engine inline always has one worker.

    Raises:
        UsageError: this machine lacks the device or the memory for the workers, the
            model cannot encode clips, or the engine inline gets an address.
        EngineUnavailableError: the Ray cluster does not answer.
        MissingExtraError: clips are to be encoded, and PyAV is not installed.
    """
    engine = execution.engine
    address = execution.address
    workers = execution.workers
    memory = execution.memory
    if engine == "inline" and address is not None:
        raise UsageError(
            f"the engine inline runs in this process, so it cannot join the cluster at"
            f" {address}; leave out the address, or use the engine ray",
            parameter="address",
        )
    if engine == "ray":
        from pipelines.engines.ray_engine import check_ray

        # Check Ray before the sources are listed, so that an error is raised at once. A
        # listing of standard input first waits for the program that writes the list.
        check_ray(address)
    if settings.frames is not None:
        with name_missing_extra("video"):
            import av  # noqa: F401
        if not info.combines_frames:
            raise UsageError(
                f"the bundle {info.path} has a {info.adapter['kind']} adapter, which"
                " cannot combine the frames of clips; use a bundle with a compressed"
                " adapter",
                parameter="model",
            )
    if engine != "inline" and address is not None:
        return execution
    max_workers = usable_cpus() // settings.threads
    if settings.is_cuda:
        max_workers = SHARDS_PER_GPU * cuda_devices()
        if not max_workers:
            raise UsageError(
                "the device is cuda, but torch finds no CUDA device on this machine;"
                " use the device cpu",
                parameter="device",
            )
    if engine == "inline":
        workers = 1
    elif workers is None:
        worker_bytes = sum(workers_memory(1, settings, info).values())
        workers = max(1, min(max_workers, usable_memory(memory) // worker_bytes))
    need = workers_memory(workers, settings, info)
    _check_memory(
        need, memory, "use fewer workers or a smaller batch size", parameter="workers"
    )
    return replace(execution, workers=workers)


def workers_memory(
    workers: int | None,
    settings: BuildSettings,
    info: BundleInfo,
) -> Need:
    """Return a lower bound of the memory in bytes that all workers need together, by
    purpose. If `workers` is None, assume one worker.
    """
    height, width = map(int, info.vision["image_size"])
    images = max(settings.batch_size, settings.frames or 1)
    batches = images * _CHANNELS * height * width * _BYTES_PER_VALUE
    parts = {
        "libraries": _PROCESS_BYTES,
        "weights": info.encoder_weights_bytes,
        "batches": batches,
    }
    return {name: (workers or 1) * size for name, size in parts.items()}


def check_ann_memory(spec: IndexSpec, memory: int | None) -> None:
    """Raise ResourcesError if the memory is too small to build the nearest-neighbour
    index for an index with the shape `spec`.

    Args:
        memory: limit in bytes, in addition to the free memory; None for no such limit.
    """
    need = AnnKind.choose(spec.rows, spec.embed_dim, memory).build_bytes(
        spec.rows, spec.embed_dim
    )
    _check_memory(
        {_ANN: need},
        memory,
        "split the sources over several indexes",
        parameter="sources",
    )


def check_disk(
    place: Place,
    spec: IndexSpec,
    memory: int | None = None,
    what: str | None = None,
) -> None:
    """Raise ResourcesError if too little disk space is free at `place`. If the index is
    on an object store, this machine needs room for temporary files: for the tokens of
    one shard, and for all other files.

    Args:
        spec: shape of the new index. For an append or an update, the shape of the new
            rows alone.
        memory: limit in bytes for the memory in which the nearest-neighbour index is
            built; None for no limit. The limit may change the kind and thus the size of
            the nearest-neighbour index.
        what: subject of the message; None for the index of the inputs.
    """
    need = disk_need(spec, memory)
    if place.remote is not None:
        shard = replace(spec, rows=min(spec.rows, spec.shard_size), segments=())
        need["tokens"] = disk_need(shard, memory)["tokens"]
    check_free_disk(
        place.root,
        need,
        what or f"the index of {counted(spec.rows, 'input')}",
        parameter="out",
    )


def check_free_disk(
    root: Path,
    need: Need,
    what: str,
    *,
    parameter: str | None = None,
) -> None:
    """Raise ResourcesError if less disk space than `need` is free at `root`. `what` is
    the subject of the message, for example "the index of 6 inputs".
    """
    if sum(need.values()) > (free := free_disk(root)):
        raise ResourcesError(
            f"{what} needs {described(need)} of disk, but only {human_bytes(free)} are"
            f" free at {root}; free some space, or use another disk",
            parameter=parameter,
        )


def disk_need(spec: IndexSpec, memory: int | None = None) -> Need:
    """Return the disk space in bytes that an index with the shape `spec` needs, by
    purpose. Each number includes 2 % for metadata files and the file system.
    """
    last = len(spec.shard_rows(spec.shards - 1))
    tokens = spec.rows * CRC_BYTES * len(spec.precisions)
    for name in spec.precisions:
        record_bytes = codec(name, spec.block_shape).record_bytes
        for rows, shards in ((spec.shard_size, spec.shards - 1), (last, 1)):
            size = padded_shard_bytes(rows, spec.shard_size, record_bytes)[1]
            tokens += shards * size
    embeddings = spec.shards * spec.shard_size * spec.embed_dim * _FLOAT32_BYTES
    # The last disk block of a file is only partly used, so count one page per file.
    rows = spec.rows * _ROW_BYTES + spec.shards * _FILES_PER_SHARD * PAGE_BYTES
    ann = spec.rows * AnnKind.choose(spec.rows, spec.embed_dim, memory).vector_bytes(
        spec.embed_dim
    )
    parts = {"tokens": tokens, "embeddings": embeddings, "rows": rows, "ann": ann}
    return {name: int(size * _SLACK) for name, size in parts.items()}


def _check_memory(
    need: Need,
    limit: int | None,
    advice: str,
    *,
    parameter: str,
) -> None:
    available = usable_memory(limit)
    if sum(need.values()) > available:
        state = "free"
        if available == limit:
            state = "allowed"
            advice = f"allow more, or {advice}"
            parameter = "memory"
        raise ResourcesError(
            f"the build needs at least {described(need)} of memory, but only"
            f" {human_bytes(available)} are {state}; {advice}",
            parameter=parameter,
        )
