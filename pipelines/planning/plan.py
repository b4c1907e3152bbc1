"""The build plan: all that decides what an index will hold, and its frozen form `build/plan.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from storage_formats.atomic import write_json_atomic
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Layout

PLAN_VERSION = 1


@dataclass(frozen=True)
class BuildSettings:
    """Settings that decide, or may decide, stored bytes; see `BuildConfig`. Nothing in them is still to be chosen."""

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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuildSettings:
        """Raises KeyError or TypeError for anything that is not a plan's settings."""
        given = {field.name: value[field.name] for field in fields(cls)}
        return cls(**{**given, "sources": tuple(given["sources"]), "precisions": tuple(given["precisions"])})


@dataclass(frozen=True)
class BuildPlan:
    """A frozen build.

    Attributes:
        root: the index.
        spec: its shape.
        model: `fingerprint` of the encoder, `bundle` (its folder), `vision` (the tower's name), `trained`.
        settings: see `BuildSettings`.
        inputs_digest: SHA-256 over the list of inputs in row order.
        duplicates: inputs byte-identical to an earlier one; counted with `dedupe` alone.
        ignored: files of the sources that are no inputs, by extension.
    """

    root: Path
    spec: IndexSpec
    model: dict[str, Any]
    settings: BuildSettings
    inputs_digest: str
    duplicates: int
    ignored: dict[str, int]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides the stored bytes; the number of workers and the engine do not."""
        return plan_fingerprint(self.model, self.settings, self.inputs_digest)

    def write(self) -> None:
        """Commit the plan: from this call on a build can be resumed."""
        write_json_atomic(
            Layout(self.root).plan,
            {
                "version": PLAN_VERSION,
                "fingerprint": self.fingerprint,
                "spec": asdict(self.spec),
                "model": self.model,
                "settings": asdict(self.settings),
                "inputs_digest": self.inputs_digest,
                "duplicates": self.duplicates,
                "ignored": self.ignored,
            },
        )


def read_plan(root: Path) -> BuildPlan | None:
    """The plan of a begun index; None where there is none.

    Raises:
        CorruptIndexError: `plan.json` is damaged, or of another version of this program.
    """
    path = Layout(root).plan
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptIndexError(f"cannot read {path}: {error}; remove {root} and build again") from error
    try:
        spec = value["spec"]
        lists = {"block_shape": tuple(spec["block_shape"]), "precisions": tuple(spec["precisions"])}
        plan = BuildPlan(
            root=root,
            spec=IndexSpec(**{**spec, **lists}),
            model=dict(value["model"]),
            settings=BuildSettings.from_json(value["settings"]),
            inputs_digest=str(value["inputs_digest"]),
            duplicates=int(value["duplicates"]),
            ignored=dict(value["ignored"]),
        )
        intact = value["version"] == PLAN_VERSION and value["fingerprint"] == plan.fingerprint
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptIndexError(f"{path} is not a build plan ({error!r}); remove {root} and build again") from error
    if not intact:
        raise CorruptIndexError(f"{path} was changed or is of another version; remove {root} and build again")
    return plan


def plan_fingerprint(model: dict[str, Any], settings: BuildSettings, inputs_digest: str) -> str:
    """SHA-256, as hex, over the encoder's fingerprint, the settings and the list of inputs."""
    parts = {
        "version": PLAN_VERSION,
        "encoder": model["fingerprint"],
        "settings": asdict(settings),
        "inputs": inputs_digest,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def describe_differences(
    found: tuple[dict[str, Any], BuildSettings], asked: tuple[dict[str, Any], BuildSettings]
) -> list[str]:
    """What differs between two (model, settings), one line of words each: what is there, and what was asked."""
    (model, settings), (asked_model, asked_settings) = found, asked
    lines = []
    if model["fingerprint"] != asked_model["fingerprint"]:
        lines.append(
            f"model {model['vision']} ({model['fingerprint']}) there, "
            f"{asked_model['vision']} ({asked_model['fingerprint']}) asked"
        )
    for field in fields(BuildSettings):
        there, here = getattr(settings, field.name), getattr(asked_settings, field.name)
        if there != here:
            lines.append(f"{field.name.replace('_', '-')} {_shown(there)} there, {_shown(here)} asked")
    return lines


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
