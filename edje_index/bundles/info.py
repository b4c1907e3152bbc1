"""``bundle.json``: what a model bundle says about itself, readable without torch.

A bundle is one folder:

    bundle.json                        this file: sizes, origin, hash of every other file, fingerprints
    vision/open_clip_config.json       open_clip's model and preprocessing configuration
    vision/open_clip_model.safetensors weights of the image and text tower
    vision/...                         tokenizer of the text tower, where it is not open_clip's own
    adapter.safetensors                weights of the adapter
    joint/config.json                  BERT configuration of the joint encoder
    joint/model.safetensors            its weights
    joint/...                          its tokenizer
    bank.safetensors                   the query bank, where there is one

``vision/`` is a folder that open_clip itself opens as ``local-dir:BUNDLE/vision``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edje_index.errors import ModelError
from edje_index.filesystem import read_versioned
from edje_index.models.safety import check_bundle_folder
from edje_index.scoring.weights import ScoreWeights

FORMAT = "edje-model-bundle"
FORMAT_VERSION = 1
INFO_FILE = "bundle.json"
VISION_FOLDER, JOINT_FOLDER = "vision", "joint"
VISION_CONFIG = "vision/open_clip_config.json"
VISION_WEIGHTS = "vision/open_clip_model.safetensors"
ADAPTER_WEIGHTS = "adapter.safetensors"
JOINT_CONFIG = "joint/config.json"
JOINT_WEIGHTS = "joint/model.safetensors"
BANK_WEIGHTS = "bank.safetensors"
# The files that decide what an index stores; text tower, joint encoder and tokenizers decide only how it is searched.
ENCODER_FILES = (VISION_CONFIG, VISION_WEIGHTS, ADAPTER_WEIGHTS)


@dataclass(frozen=True)
class BundleInfo:
    """A bundle's own account of itself.

    Attributes:
        path: the bundle's folder.
        vision: ``name``, ``patch_dim``, ``num_patches``, ``num_heads``, ``embed_dim``, ``image_size`` of the tower.
        adapter: fields of the adapter's configuration.
        joint: ``text_embed_dim`` of the joint encoder's text-embedding head; ``embedding_weight``, ``late_weight``,
            ``pooled_weight`` and ``prior_weight`` of the final score, where they are not 0, with
            ``prior_temperature``; ``caption_weights`` where captions have their own; sizes of ``pooled`` and ``bank``,
            where there is one.
        trained: False for random weights.
        notes: where the weights came from, for people.
        files: relative path to ``{"bytes", "sha256"}``, every file but ``bundle.json``.
        fingerprint: sha256 over everything that decides any output.
        encoder_fingerprint: sha256 over what decides the stored tokens and embeddings.
    """

    path: Path
    vision: Mapping[str, Any]
    adapter: Mapping[str, Any]
    joint: Mapping[str, Any]
    trained: bool
    notes: str
    files: Mapping[str, Mapping[str, Any]]
    fingerprint: str
    encoder_fingerprint: str

    @property
    def vision_name(self) -> str:
        """open_clip's name of the tower."""
        return str(self.vision["name"])

    @property
    def block_shape(self) -> tuple[int, int]:
        """(m, d) of one image's stored tokens."""
        return int(self.adapter["num_tokens"]), int(self.adapter["language_dim"])

    @property
    def embed_dim(self) -> int:
        """Width of the pooled embedding."""
        return int(self.vision["embed_dim"])

    @property
    def weights(self) -> ScoreWeights:
        """Of the final score that images are sorted by."""
        named = {name: float(self.joint.get(f"{name}_weight", 0.0)) for name in ("late", "pooled", "prior")}
        similarity = float(self.joint.get("embedding_weight", 0.0))
        return ScoreWeights(similarity, **named, temperature=float(self.joint.get("prior_temperature", 1.0)))

    @property
    def caption_weights(self) -> ScoreWeights:
        """Of the one that captions are sorted by; the same, where it says nothing else."""
        own = self.joint.get("caption_weights")
        return self.weights if own is None else ScoreWeights.of_json(own)

    @property
    def pooled(self) -> dict[str, int] | None:
        """``words`` and ``dim`` of the pooled similarity; None where the joint encoder has none."""
        sizes = self.joint.get("pooled")
        return None if sizes is None else {name: int(sizes[name]) for name in ("words", "dim")}

    @property
    def bank(self) -> dict[str, int] | None:
        """``captions``, ``images`` and ``dim`` of the query bank; None without one."""
        sizes = self.joint.get("bank")
        return None if sizes is None else {name: int(sizes[name]) for name in ("captions", "images", "dim")}

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(int(f["bytes"]) for name, f in self.files.items() if name.endswith(".safetensors"))

    @property
    def encoder_weights_bytes(self) -> int:
        """Bytes of the weights of the towers and the adapter: an upper bound for what an encoder process holds."""
        return sum(int(self.files[name]["bytes"]) for name in (VISION_WEIGHTS, ADAPTER_WEIGHTS))

    def to_json(self) -> dict[str, Any]:
        """Content of ``bundle.json``."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "vision": dict(self.vision),
            "adapter": dict(self.adapter),
            "joint": dict(self.joint),
            "trained": self.trained,
            "notes": self.notes,
            "files": {name: dict(record) for name, record in self.files.items()},
            "fingerprint": self.fingerprint,
            "encoder_fingerprint": self.encoder_fingerprint,
        }


def describe_bundle(
    path: Path,
    *,
    vision: Mapping[str, Any],
    adapter: Mapping[str, Any],
    joint: Mapping[str, Any],
    trained: bool,
    notes: str,
) -> BundleInfo:
    """Hash the files that lie in ``path`` and make the account of them."""
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file() and p.name != INFO_FILE)
    files = {name: {"bytes": (path / name).stat().st_size, "sha256": _sha256(path / name)} for name in names}
    fingerprint = _fingerprint(adapter, joint, files, files)
    encoder = encoder_fingerprint(adapter, files)
    return BundleInfo(path, vision, adapter, joint, trained, notes, files, fingerprint, encoder)


def read_bundle_info(path: str | Path) -> BundleInfo:
    """Read ``bundle.json`` of a bundle; weights are neither read nor checked (see :func:`verify_files`).

    Raises:
        ModelError: not a bundle, one of another version, or a file changed by hand.
    """
    folder = Path(path)
    content = read_versioned(folder / INFO_FILE, "model bundle", form=FORMAT, versions=[FORMAT_VERSION])
    try:
        info = BundleInfo(
            path=folder,
            vision=dict(content["vision"]),
            adapter=dict(content["adapter"]),
            joint=dict(content["joint"]),
            trained=bool(content["trained"]),
            notes=str(content["notes"]),
            files=dict(content["files"]),
            fingerprint=str(content["fingerprint"]),
            encoder_fingerprint=str(content["encoder_fingerprint"]),
        )
        for weights in (info.weights, info.caption_weights):
            ScoreWeights.of_json(weights._asdict())
        if info.pooled is not None and min(info.pooled.values()) < 0:
            raise ValueError(f"sizes of the pooled similarity are {info.pooled}")
        if info.bank is not None and min(info.bank["captions"], info.bank["images"], info.bank["dim"] + 1) < 1:
            raise ValueError(f"sizes of the query bank are {info.bank}")
        expected = (
            _fingerprint(info.adapter, info.joint, info.files, info.files),
            encoder_fingerprint(info.adapter, info.files),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / INFO_FILE} is damaged ({error!r}): make the bundle anew") from error
    if expected != (info.fingerprint, info.encoder_fingerprint):
        raise ModelError(f"{folder / INFO_FILE} was changed: its fingerprint does not fit it; make the bundle anew")
    check_bundle_folder(folder, info.files)
    return info


def encoder_fingerprint(adapter: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """sha256 over what decides the stored tokens and embeddings: `files` are as in :class:`BundleInfo`."""
    return _fingerprint(adapter, {}, files, ENCODER_FILES)


def verify_files(info: BundleInfo, names: Iterable[str] | None = None) -> None:
    """Compare files with the hashes in ``bundle.json``; all of them, or those named.

    Raises:
        ModelError: a file is missing or has other content.
    """
    for name in info.files if names is None else names:
        file, record = info.path / name, info.files[name]
        if not file.is_file():
            raise ModelError(f"the bundle {info.path} lacks {name}: copy the whole folder, or make it anew")
        if file.stat().st_size != record["bytes"] or _sha256(file) != record["sha256"]:
            raise ModelError(f"{file} is not the file that the bundle was made with: copy it again, or make it anew")


def _fingerprint(
    adapter: Mapping[str, Any], joint: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> str:
    hashes = {name: files[name]["sha256"] for name in names}
    parts = {"format_version": FORMAT_VERSION, "adapter": dict(adapter), "joint": dict(joint), "files": hashes}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
