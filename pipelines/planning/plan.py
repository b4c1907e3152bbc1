"""The build plan: everything that determines the bytes of an index, stored in `build/plan.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.planning.config import BuildConfig
from pipelines.planning.machine import cuda_devices
from storage_formats.atomic import write_json_atomic
from storage_formats.cpus import has_bfloat16, usable_cpus
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.format.checksum import json_checksum
from storage_formats.format.index_files import read_index_file
from storage_formats.format.layout import IndexSpec, Layout, Segment
from storage_formats.format.source_columns import SourceColumn, columns_from_json

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from storage_formats.format.manifest import Manifest

_PLAN_VERSION = 2  # of the files in `build/`; version 1 had one list of inputs per shard
_FINGERPRINT_VERSION = 1  # of the rules by which a plan determines the stored bytes
# With the values that earlier versions of this program used.
_LATER_SETTINGS = {"truncated": "fail", "frames": None}
_CPU_BATCH = 8  # the activations of larger batches do not fit into the caches
_CUDA_BATCH = 32
_MAX_THREADS = 4  # a small ViT gains little from more threads; more workers use the CPUs better


def default_device() -> str:
    """Return the device that "auto" selects on this machine."""
    return "cuda" if cuda_devices() else "cpu"


def default_threads() -> int:
    """Return the number of CPU threads per worker if the request names none."""
    return min(usable_cpus(), _MAX_THREADS)


@dataclass(frozen=True)
class BuildSettings:
    """The settings of a `BuildConfig` that affect the stored bytes. Actual values replace "auto" and other defaults."""

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
    truncated: str = "fail"
    frames: int | None = None

    @classmethod
    def choose(cls, config: BuildConfig, stored: BuildSettings | None = None) -> BuildSettings:
        """Return the settings of `config`, with actual values instead of "auto" and other defaults.

        Args:
            config: build request.
            stored: settings of an existing index, which give the values that depend on the hardware. None derives
                these values from this machine.
        """
        from edje_index.images.decode import DEFAULT_MAX_PIXELS
        from pipelines.sources.base import absolute_spec

        device, dtype, threads = config.device, config.dtype, config.threads
        if device == "auto":
            device = stored.device if stored else default_device()
        if dtype is None or dtype == "auto":
            # Without "auto", equal devices choose alike, so that the bytes do not depend on the model of the CPU.
            is_fast = device == "cuda" or (dtype == "auto" and has_bfloat16())
            dtype = stored.dtype if stored else "bfloat16" if is_fast else "float32"
        if threads is None:
            threads = stored.threads if stored else default_threads()
        batch_size = config.batch_size
        if batch_size is None:
            batch_size = stored.batch_size if stored else _CPU_BATCH if device == "cpu" else _CUDA_BATCH
        return cls(
            sources=tuple(absolute_spec(source) for source in config.sources),
            column=config.column,
            dedupe=config.dedupe,
            shard_size=config.shard_size,
            precisions=tuple(dict.fromkeys(config.precisions)),
            max_pixels=config.max_pixels or DEFAULT_MAX_PIXELS,
            batch_size=batch_size,
            threads=threads,
            device=device,
            dtype=dtype,
            truncated=config.truncated,
            frames=config.frames,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuildSettings:
        """Return the settings that a plan stores as `value`.

        Raises:
            KeyError, TypeError: `value` is not a JSON object with the settings of a plan.
        """
        settings = {setting.name: value[setting.name] for setting in fields(cls) if setting.name not in _LATER_SETTINGS}
        settings |= {name: value.get(name, default) for name, default in _LATER_SETTINGS.items()}
        settings["sources"], settings["precisions"] = tuple(settings["sources"]), tuple(settings["precisions"])
        return cls(**settings)


@dataclass(frozen=True)
class BuildPlan:
    """The plan of a build or of a change that adds rows. The plan determines the stored bytes.

    Attributes:
        root: directory of the index.
        spec: sizes and precisions of the index.
        model: description of the model bundle; see `model_record`.
        settings: settings that affect the stored bytes.
        inputs_digest: SHA-256 of the inputs in row order, in hexadecimal.
        duplicates: number of inputs that are byte-identical to an earlier input; 0 without `dedupe`. For a change of a
            finished index, the number of inputs that get no row because another row has the same content.
        ignored: number of entries in the sources that are not inputs, by suffix or reason.
        input_checksums: CRC-32C of each file in `build/inputs/`, in hexadecimal, by file name; empty for a finished
            index.
        columns: source columns of the index after the build or change.
        change: "build", "append", "update" or "retry-failed".
    """

    root: Path
    spec: IndexSpec
    model: dict[str, Any]
    settings: BuildSettings
    inputs_digest: str
    duplicates: int
    ignored: dict[str, int]
    input_checksums: dict[str, str] = field(default_factory=dict)
    columns: tuple[SourceColumn, ...] = ()
    change: str = "build"

    @property
    def is_append(self) -> bool:
        """True if the plan adds rows to a finished index."""
        return bool(self.spec.segments)

    @property
    def shards(self) -> range:
        """Numbers of the shards to write."""
        return self.spec.segment_shards(self.spec.used_segments[-1])

    @property
    def rows(self) -> int:
        """Number of rows to write."""
        return self.spec.used_segments[-1].rows

    @property
    def path(self) -> Path:
        """Path of the plan file."""
        layout = Layout(self.root)
        return layout.append_plan if self.is_append else layout.plan

    @property
    def restart(self) -> str:
        """Advice in error messages on what to do if the plan cannot be resumed."""
        if self.is_append:
            return f"{discard_change(self.root)}, and run '{self.change}' again"
        return f"remove {self.root} and build again"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the stored bytes, in hexadecimal."""
        return plan_fingerprint(self.model, self.settings, self.inputs_digest)

    def write(self) -> None:
        """Store the plan. A build that is interrupted after this call can be resumed."""
        content = {**asdict(self), "version": _PLAN_VERSION, "fingerprint": self.fingerprint}
        content["columns"] = [column.to_json() for column in self.columns]
        del content["root"]
        write_json_atomic(self.path, {**content, "crc32c": json_checksum(content)})


def discard_change(root: Path) -> str:
    """Return the advice in error messages on how to discard a stopped change of the index at `root`."""
    return f"discard the stopped change with 'edje-index gc {root}', which keeps the committed rows"


def plan_of_manifest(root: Path, manifest: Manifest) -> BuildPlan:
    """Return the plan that the finished index at `root` was built from.

    Raises:
        UsageError: the index was not made by a build.
    """
    try:
        settings = BuildSettings.from_json(manifest.settings)
        digest = str(manifest.settings["inputs_digest"])
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{root} was not built from images, so a build cannot resume it; choose another output directory",
            parameter="out",
        ) from error
    return BuildPlan(root, manifest.spec, manifest.model, settings, digest, manifest.counts.duplicates, ignored={})


def read_plan(root: Path, *, append: bool = False) -> BuildPlan | None:
    """Return the plan of an unfinished build or change; None if there is no plan.

    Args:
        root: directory of the index.
        append: True to read the plan of a change that adds rows, False to read the plan of a build.

    Raises:
        CorruptIndexError: the plan is damaged, or another version of this program wrote the plan.
    """
    path = Layout(root).append_plan if append else Layout(root).plan
    restart = discard_change(root) if append else f"remove {root} and build again"
    try:
        value = json.loads(read_index_file(root, path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptIndexError(f"cannot read {path}: {error}; {restart}") from error
    try:
        spec = value["spec"]
        tuples = {
            "block_shape": tuple(spec["block_shape"]),
            "precisions": tuple(spec["precisions"]),
            "segments": tuple(Segment(**segment) for segment in spec.get("segments", ())),
        }
        plan = BuildPlan(
            root=root,
            spec=IndexSpec(**{**spec, **tuples}),
            model=dict(value["model"]),
            settings=BuildSettings.from_json(value["settings"]),
            inputs_digest=str(value["inputs_digest"]),
            duplicates=int(value["duplicates"]),
            ignored=dict(value["ignored"]),
            input_checksums=dict(value["input_checksums"]),
            columns=columns_from_json(value.get("columns", [])),
            change=str(value.get("change", "append" if append else "build")),
        )
        intact = value["version"] == _PLAN_VERSION and value["crc32c"] == json_checksum(value)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(f"{path} is not a valid build plan ({error!r}); {restart}") from error
    if not intact:
        raise CorruptIndexError(
            f"{path} was changed, damaged, or written by another version of this program; {restart}"
        )
    return plan


def plan_fingerprint(model: dict[str, Any], settings: BuildSettings, inputs_digest: str) -> str:
    """Return the SHA-256 of the encoder fingerprint, the settings and the inputs digest, in hexadecimal."""
    values = asdict(settings)
    for name, default in _LATER_SETTINGS.items():  # without them, plans of earlier versions keep their fingerprints
        if values[name] == default:
            del values[name]
    parts = {
        "version": _FINGERPRINT_VERSION,
        "encoder": model["fingerprint"],
        "settings": values,
        "inputs": inputs_digest,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def model_record(info: BundleInfo) -> dict[str, Any]:
    """Return the description of a model bundle that plans and manifests store."""
    return {
        "fingerprint": info.encoder_fingerprint,
        "bundle": str(info.path.resolve()),
        "vision": info.vision_name,
        "trained": info.trained,
    }


def settings_of_request(config: BuildConfig, info: BundleInfo, plan: BuildPlan | None) -> BuildSettings:
    """Return the settings of `config`. If `plan` is not None, check that `plan` has the same model and settings.

    Raises:
        UsageError: the model or the settings differ from `plan`.
    """
    settings = BuildSettings.choose(config, plan.settings if plan else None)
    if plan is not None:
        _refuse_differences(plan, info, settings)
    return settings


def _refuse_differences(plan: BuildPlan, info: BundleInfo, settings: BuildSettings) -> None:
    model = model_record(info)
    differences = {}
    if plan.model["fingerprint"] != model["fingerprint"]:
        stored, requested = (f"{record['vision']} ({record['fingerprint']})" for record in (plan.model, model))
        differences["model"] = f"model {stored} in the index, {requested} requested"
    for name in (setting.name for setting in fields(BuildSettings)):
        stored, requested = (_in_words(getattr(values, name)) for values in (plan.settings, settings))
        if stored != requested:
            differences[name] = f"{name} {stored} in the index, {requested} requested"
    if differences:
        requested = plan_fingerprint(model, settings, plan.inputs_digest)
        raise UsageError(
            f"{plan.root} was built with other settings: {'; '.join(differences.values())} (plan {plan.fingerprint} in "
            f"the index, {requested} requested). Use the model and settings of the index, or choose another output "
            "directory",
            parameter=next(iter(differences)),
        )


def _in_words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
