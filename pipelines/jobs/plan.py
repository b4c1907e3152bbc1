"""The plan of new rows: everything that determines the bytes that a build, an append or
an update writes. Also the memory and the disk space that the work needs, and the number
of workers.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from edje_index.bundles.info import BundleInfo
from edje_index.indexing.faiss_index import AnnKind
from edje_index.models import MAX_FRAMES
from pipelines.environment import cuda_devices, free_disk
from pipelines.progress.wording import counted, human_bytes
from storage_formats.arguments import as_number, optional_count
from storage_formats.atomic import Json, make_directories
from storage_formats.cgroups import available_memory
from storage_formats.change import Change
from storage_formats.codecs import codec
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.file_check import FileEntry
from storage_formats.format.json_values import read_json
from storage_formats.format.layout import (
    CRC_BYTES,
    PAGE_BYTES,
    SHARD_SIZE,
    IndexSpec,
    padded_shard_bytes,
)
from storage_formats.format.manifest import Manifest
from storage_formats.format.places import Place
from storage_formats.format.receipts import fingerprint
from storage_formats.format.source_columns import (
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    MAX_SHARD_BYTES,
    CountedColumns,
    SourceColumn,
    Value,
    metadata_text,
)
from storage_formats.remote.urls import IndexLocation
from storage_formats.threads import has_bfloat16, usable_cpus

if TYPE_CHECKING:
    from edje_index.inputs.preparation import DecodeSettings
    from edje_index.inputs.refs import InputRef
    from pipelines.sources.base import Source


TOO_LONG = "(metadata too long)"
TOO_MANY = "(too many metadata columns)"
SHARDS_PER_GPU = 2
"""Number of shards that are encoded at the same time on a GPU. While the model runs on
a batch of one shard, images of the other are decoded, or its blocks are written.
"""

# Images per forward pass on a CPU. The activations of larger batches do not fit into
# the caches.
_CPU_BATCH = 8
# Images per forward pass on a GPU. The CPU needs as much time to launch the kernels of
# a smaller batch, so with a smaller batch, the GPU would wait for the CPU.
_CUDA_BATCH = 128
# Shards get more than SHARD_SIZE rows only if the index then has at least this many
# shards.
_LEAST_SHARDS = 1000
_MAX_SHARD_SIZE = 16384
# Largest default number of threads per worker. A small ViT gains little from more
# threads; more workers use the CPUs better.
_MAX_THREADS = 4

# Settings that depend on the hardware, so a resumed build keeps them, and the size of
# the shards
_FROM_STORED = ("device", "dtype", "batch_size", "threads", "shard_size")


@dataclass(frozen=True)
class BuildSettings:
    """The arguments of `pipelines.build_index` that affect the stored bytes. None and
    "auto" are replaced by the values that they stand for.
    """

    sources: tuple[str, ...]
    column: str | None
    dedupe: bool
    shard_size: int
    precisions: tuple[str, ...]
    max_pixels: int
    batch_size: int
    threads: int
    device: str
    dtype: str
    # Indexes of earlier versions do not record these settings. The defaults are the
    # values with which such indexes were built.
    truncated: str = "fail"
    frames: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def choose(
        cls,
        stored: BuildSettings | None,
        *,
        cluster: str | None = None,
        **values: Any,
    ) -> BuildSettings:
        """Return the settings of a request. None and "auto" are replaced by the values
        that they stand for.

        Args:
            stored: settings of the unfinished or finished index. Values that depend on
                the hardware are taken from it. None derives these values from the
                hardware.
            cluster: address of a Ray cluster. If it is given, device "auto" is "cuda"
                if a node of the cluster has a GPU.
            values: the requested settings, see `pipelines.build_index`.

        Raises:
            UsageError: a precision does not exist, or a number is out of range.
        """
        from edje_index.images.decode import DEFAULT_MAX_PIXELS
        from pipelines.sources.base import absolute_spec

        names = [codec(name).name for name in values["precisions"]]
        values["precisions"] = tuple(dict.fromkeys(names))
        values["sources"] = tuple(map(absolute_spec, values["sources"]))
        values["frames"] = optional_count(values["frames"], "frames", MAX_FRAMES)
        for name in ("batch_size", "threads", "shard_size", "max_pixels"):
            values[name] = optional_count(values[name], name)
        for name in _FROM_STORED if stored is not None else ():
            if values[name] in (None, "auto"):
                values[name] = getattr(stored, name)
        if values["device"] == "auto":
            from pipelines.engines.ray_engine import best_device

            values["device"] = best_device(cluster)
        is_cpu = values["device"] == "cpu"
        # Only "auto" looks at the instructions of the CPU. None depends on the device
        # alone, so that the stored bytes do not depend on the model of the CPU.
        is_fast = not is_cpu or (values["dtype"] == "auto" and has_bfloat16())
        defaults = {
            "max_pixels": DEFAULT_MAX_PIXELS,
            "batch_size": _CPU_BATCH if is_cpu else _CUDA_BATCH,
            "threads": min(usable_cpus(), _MAX_THREADS),
            "dtype": "bfloat16" if is_fast else "float32",
            # This is the size for a small collection. Once the number of rows is known,
            # a build replaces it by `default_shard_size`.
            "shard_size": SHARD_SIZE,
        }
        for name, default in defaults.items():
            if values[name] in (None, "auto"):
                values[name] = default
        return cls(**values)

    @property
    def is_cuda(self) -> bool:
        """Whether the encoder runs on a GPU."""
        return self.device != "cpu"

    def open_sources(self) -> list[Source]:
        """Open the sources, see `pipelines.sources.open_sources`."""
        from pipelines.sources import open_sources
        from pipelines.sources.base import Patterns

        return open_sources(
            self.sources,
            self.column,
            clips=self.frames is not None,
            patterns=Patterns(self.include, self.exclude),
        )

    @property
    def decoding(self) -> DecodeSettings:
        """The settings that affect how images and clips are decoded."""
        from edje_index.inputs.preparation import DecodeSettings

        return DecodeSettings(
            **{each.name: getattr(self, each.name) for each in fields(DecodeSettings)}
        )


def settings_of(root: IndexLocation, manifest: Manifest) -> BuildSettings:
    """Return the settings with which the index at `root` was built.

    Raises:
        UsageError: the index was not made by a build.
    """
    try:
        settings: BuildSettings = read_json(BuildSettings, manifest.settings)
        return settings
    except (LookupError, TypeError) as error:
        raise UsageError(
            f"{root} was not built from images, so no image can be encoded as its rows"
            " were; choose another index",
            parameter="out",
        ) from error


def default_shard_size(rows: int, row_bytes: int) -> int:
    """Return the number of rows per shard for a new index of `rows` rows.

    Larger shards make fewer files. But if a worker dies, its whole shard is encoded
    again. Shards have more than `SHARD_SIZE` rows only if the index then has at least
    1,000 shards, so that one shard is at most a thousandth of the work. The metadata of
    a shard is limited to `MAX_SHARD_BYTES`.

    Args:
        row_bytes: length of the longest metadata of a row, in bytes.
    """
    size = SHARD_SIZE
    while (
        size < _MAX_SHARD_SIZE
        and 2 * size * _LEAST_SHARDS <= rows
        and 2 * size * row_bytes <= MAX_SHARD_BYTES
    ):
        size *= 2
    return size


@dataclass(frozen=True)
class Plan:
    """The plan of the new rows of a change. It determines the stored bytes, and is
    stored in `build/journal.json`.

    Attributes:
        spec: shape of the index after the change. The new rows are its last segment.
        model: description of the model bundle; see `model_record`.
        settings: settings that affect the stored bytes.
        inputs_digest: SHA-256 of the inputs in row order, in hexadecimal.
        duplicates: number of inputs that are not encoded, because another input or row
            has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or
            reason.
        columns: source columns of the index after the change.
    """

    spec: IndexSpec
    model: Json
    settings: BuildSettings
    inputs_digest: str
    duplicates: int
    ignored: dict[str, int]
    columns: tuple[SourceColumn, ...] = ()

    @property
    def shards(self) -> range:
        """Numbers of the shards to write."""
        return self.spec.segment_shards(self.spec.used_segments[-1])

    @property
    def rows(self) -> int:
        """Number of rows to write."""
        return self.spec.used_segments[-1].rows

    @property
    def first_row(self) -> int:
        """Row id of the first new row."""
        return self.spec.used_segments[-1].first_row

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that determines the stored bytes."""
        return fingerprint(
            {
                "encoder": self.model["fingerprint"],
                "settings": asdict(self.settings),
                "inputs": self.inputs_digest,
            }
        )

    def to_json(self) -> Json:
        """Return this plan as a JSON object."""
        value: Json = json.loads(json.dumps(vars(self), default=vars))
        return value

    @classmethod
    def parse(cls, value: Json) -> Plan:
        """Return the plan described by `value`, a result of `to_json`."""
        plan: Plan = read_json(cls, value)
        return plan


def model_record(info: BundleInfo) -> Json:
    """Return the description of a model bundle that plans and manifests store."""
    return {
        "fingerprint": info.encoder_fingerprint,
        "bundle": str(info.path.resolve()),
        "vision": info.vision_name,
        "trained": info.trained,
    }


def refuse_differences(
    root: IndexLocation,
    stored_model: Mapping[str, Any],
    stored: BuildSettings,
    info: BundleInfo,
    values: Json,
) -> None:
    """Raise UsageError if the requested model and settings differ from those of the
    unfinished or finished index at `root`.

    Args:
        stored_model: description of the model of the index, see `model_record`.
        stored: settings of the index.
        info: description of the requested model bundle.
        values: requested settings: keyword arguments of `BuildSettings.choose`.
    """
    requested = BuildSettings.choose(stored, **values)
    models = (stored_model, model_record(info))
    pairs: dict[str, Sequence[Any]] = {
        "model": [f"{each['vision']} ({each['fingerprint']})" for each in models],
        **{
            name: (each, getattr(requested, name))
            for name, each in vars(stored).items()
        },
    }
    differences = {}
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            left, right = (
                ", ".join(each) if isinstance(each, tuple) else each for each in pair
            )
            differences[name] = f"{name} {left} in the index, {right} requested"
    if differences:
        append = ", append other sources" if "sources" in differences else ""
        raise UsageError(
            f"{root} was built with other settings: {'; '.join(differences.values())}."
            f" Use the model and settings of the index{append}, or choose another"
            " output directory",
            parameter=next(iter(differences)),
        )


def store_inputs(
    change: Change,
    refs: Iterable[InputRef],
    shard_size: int,
    *,
    first_shard: int = 0,
    earlier_columns: Collection[SourceColumn] = (),
) -> CollectedInputs:
    """Write `refs` to the input lists in `build/inputs/`. Earlier files in this
    directory are removed. A dry run only counts the inputs. Return the counts and the
    source columns of the inputs.

    Args:
        shard_size: number of rows per shard.
        first_shard: number of the first shard to list.
        earlier_columns: source columns that the index already has.
    """
    from edje_index.inputs.input_lists import write_input_lists

    collected = CollectedInputs(shard_size, earlier_columns)
    stored = map(collected.add, refs)
    if change.is_dry:
        deque(stored, maxlen=0)
    else:
        layout = change.layout
        directory = layout.input_lists
        layout.remove(layout.names(directory))
        make_directories(directory)
        paths = write_input_lists(layout, stored, shard_size, first_shard=first_shard)
        layout.put([(path, FileEntry.of(layout, path)) for path in paths])
    return collected


class CollectedInputs(CountedColumns):
    """The counts and the source columns of all inputs that were added so far. If the
    inputs have more than `MAX_COLUMNS` columns, those that appear first are kept.

    Args:
        shard_size: number of rows per shard. More rows per shard leave less metadata
            per row, because the metadata of a shard is limited.
        earlier: source columns that the index already has.

    Attributes:
        rows: number of inputs. Each gets a row.
        duplicates: number of inputs with the same content as an earlier input.
        failed: number of inputs that cannot be read, by problem.
        ignored: number of values of source columns that are not stored, by reason.
        row_bytes: length of the longest metadata that was added, in bytes.
    """

    def __init__(
        self,
        shard_size: int,
        earlier: Collection[SourceColumn] = (),
    ) -> None:
        super().__init__(earlier)
        self.rows = 0
        self.duplicates = 0
        self.failed = Counter[str]()
        self.ignored = Counter[str]()
        self.row_bytes = 0
        self._max_row_bytes = min(MAX_ROW_BYTES, MAX_SHARD_BYTES // shard_size)

    def add(self, ref: InputRef) -> InputRef:
        """Add one input. Return the input with only the metadata to store.

        Values are left out if the metadata is too long or if there are too many
        columns. `ignored` counts these values.
        """
        self.rows += 1
        self.duplicates += ref.duplicate_of is not None
        if ref.problem is not None:
            self.failed[ref.problem] += 1
        if not ref.metadata:
            return ref
        kept: dict[str, Value] = {}
        new = 0
        for name, value in ref.metadata.items():
            new += name not in self.kinds
            if name in self.kinds or len(self.kinds) + new <= MAX_COLUMNS:
                kept[name] = value
            else:
                self.ignored[TOO_MANY] += 1
        lengths = {
            name: len(metadata_text({name: value}).encode())
            for name, value in kept.items()
        }
        total = sum(lengths.values())
        # If the metadata is too long, leave out its longest values.
        for name in sorted(lengths, key=lambda name: (-lengths[name], name)):
            if total <= self._max_row_bytes:
                break
            self.ignored[TOO_LONG] += 1
            total -= lengths[name]
            del kept[name]
        self.row_bytes = max(self.row_bytes, total)
        for name, value in kept.items():
            self.count(name, value)
        return dataclasses.replace(ref, metadata=kept or None)


SOURCES_MEMBER = "indexed_sources"
"""Key in the settings of an index. The value lists the sources of all rows, one
`SourceGroup` per command that added rows; it is null if the sources are unknown. After
a single build, the key is missing.
"""


@dataclass(frozen=True)
class SourceGroup:
    """The sources that were given to one command.

    Attributes:
        sources: absolute paths or URLs of the sources.
        column: name of the path column in lists of paths; None if none was given.
    """

    sources: tuple[str, ...]
    column: str | None = None


def recorded_sources(manifest: Manifest) -> tuple[SourceGroup, ...] | None:
    """Return the sources of all rows, one group per command that added rows. Return
    None if the index does not record the sources of all its rows.
    """
    settings = manifest.settings
    first = manifest.spec.used_segments[0]
    try:
        if SOURCES_MEMBER in settings:
            groups: tuple[SourceGroup, ...] | None = read_json(
                tuple[SourceGroup, ...] | None, settings[SOURCES_MEMBER]
            )
            return groups
        if len(manifest.spec.used_segments) > 1 or first.first_row:
            return None
        return (read_json(SourceGroup, settings),) if "sources" in settings else None
    except (AttributeError, TypeError) as error:
        raise CorruptIndexError(
            f"the recorded sources of the index are damaged: {error!r}; name all"
            " sources"
        ) from error


def with_sources(manifest: Manifest, groups: Iterable[SourceGroup] | None) -> Json:
    """Return the settings of `manifest`, with `groups` recorded as the sources of all
    rows. If `groups` is None, the sources are recorded as unknown.
    """
    recorded = None if groups is None else [dict(vars(group)) for group in groups]
    return {**manifest.settings, SOURCES_MEMBER: recorded}


Need = dict[str, int]
"""The required memory or disk space in bytes, by purpose."""

_ANN = "nearest-neighbour index"
_BUILD = "the build needs at least"
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
    max_failed: float | None = None

    def __post_init__(self) -> None:
        optional_count(self.workers, "workers")
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
    if address is not None:
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
        workers = max(1, min(max_workers, available_memory() // worker_bytes))
    need = workers_memory(workers, settings, info)
    advice = "; use fewer workers or a smaller batch size"
    _check_free(need, available_memory(), _BUILD, "memory", advice, "workers")
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


def check_ann_memory(spec: IndexSpec) -> None:
    """Raise UsageError if the memory is too small to build the nearest-neighbour index
    for an index with the shape `spec`.
    """
    kind = AnnKind.choose(spec.rows, spec.embed_dim)
    need = {_ANN: kind.build_bytes(spec.rows, spec.embed_dim)}
    advice = "; split the sources over several indexes"
    _check_free(need, available_memory(), _BUILD, "memory", advice, "sources")


def check_disk(
    place: Place,
    spec: IndexSpec,
    what: str | None = None,
    *,
    only_tokens: bool = False,
    parameter: str = "out",
) -> None:
    """Raise UsageError if too little disk space is free at `place`. If the index is on
    an object store, this machine needs room for temporary files: for the tokens of one
    shard, and for all other files.

    Args:
        spec: shape of the new index. For an append or an update, the shape of the new
            rows alone.
        what: subject of the message; None for the index of the inputs.
        only_tokens: True if no other files are written.
        parameter: see `EdjeError`.
    """
    need = disk_need(spec)
    if place.remote is not None:
        shard = replace(spec, rows=min(spec.rows, spec.shard_size), segments=())
        need["tokens"] = disk_need(shard)["tokens"]
    if only_tokens:
        need = {"tokens": need["tokens"]}
    what = what or f"the index of {counted(spec.rows, 'input')}"
    advice = f" at {place.root}; free some space, or use another disk"
    free = free_disk(place.root)
    _check_free(need, free, f"{what} needs", "disk", advice, parameter)


def disk_need(spec: IndexSpec) -> Need:
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
    kind = AnnKind.choose(spec.rows, spec.embed_dim)
    ann = spec.rows * kind.vector_bytes(spec.embed_dim)
    parts = {"tokens": tokens, "embeddings": embeddings, "rows": rows, "ann": ann}
    return {name: int(size * _SLACK) for name, size in parts.items()}


def _check_free(
    need: Need, free: int, what: str, kind: str, advice: str, parameter: str
) -> None:
    """Raise UsageError if fewer than the bytes of `need` are free. The message begins
    with `what` and ends with `advice`. `kind` is "disk" or "memory".
    """
    total = sum(need.values())
    if total > free:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in need.items())
        raise UsageError(
            f"{what} {human_bytes(total)} ({parts}) of {kind}, but only"
            f" {human_bytes(free)} are free{advice}",
            parameter=parameter,
        )
