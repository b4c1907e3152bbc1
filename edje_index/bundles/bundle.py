"""Model bundles: one folder with all that indexing and search need. Its layout is in ``bundle_info``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.image_half import load_adapter
from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    BANK_WEIGHTS,
    INFO_FILE,
    JOINT_CONFIG,
    JOINT_FOLDER,
    JOINT_WEIGHTS,
    VISION_FOLDER,
    VISION_WEIGHTS,
    BundleInfo,
    describe_bundle,
    read_bundle_info,
    verify_files,
)
from edje_index.errors import ModelError
from edje_index.filesystem import new_folder, write_json
from edje_index.models.adapter import LOCAL, PATCHES, REDUCTIONS, Adapter
from edje_index.models.bf16 import as_tensor
from edje_index.models.clip_model import HF_TEXT_FOLDER, ClipConfig, build_clip, read_clip_config
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.text_tower import TextTower, save_text_tokenizer, text_tokenizer
from edje_index.models.vision_tower import VisionTower, vision_tower
from edje_index.models.weights import assign_weights, read_weights, save_weights
from edje_index.scoring.hubness import QueryBank
from edje_index.scoring.pooled_similarity import PooledSimilarity
from edje_index.scoring.weights import ScoreWeights

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class ModelBundle:
    """Image and text tower, adapter and joint encoder, in memory.

    Attributes:
        clip: the open_clip model that holds both towers.
        clip_config: what it was built from.
        text_tokenizer: tokenizer of the text tower.
        adapter: from patch tokens to stored tokens.
        joint: the joint encoder, with its own tokenizer.
        trained: False for random weights: scores and order then mean nothing.
        notes: where the weights came from, for people.
        embedding_weight: w of the score that re-ranking sorts by, joint score + w x embedding similarity.
        bank: `prior_weight` times its prior is taken off that score; None without. The prior's temperature is
            `prior_temperature`.
        own_caption_weights: of the score that captions are sorted by; None where it is the same.
        info: of the folder that this was loaded from; None for a bundle made in memory.
    """

    clip: torch.nn.Module
    clip_config: ClipConfig
    text_tokenizer: Any
    adapter: Adapter
    joint: JointEncoder
    trained: bool
    notes: str = ""
    embedding_weight: float = 0.0
    bank: QueryBank | None = None
    prior_weight: float = 0.0
    prior_temperature: float = 1.0
    own_caption_weights: ScoreWeights | None = None
    info: BundleInfo | None = None

    @cached_property
    def vision(self) -> VisionTower:
        """The frozen image tower."""
        return vision_tower(self.clip.visual)  # type: ignore[arg-type]

    @cached_property
    def text(self) -> TextTower:
        """The frozen text tower."""
        return TextTower(self.clip, self.text_tokenizer)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(m, d) of one image's stored tokens."""
        return self.adapter.config.num_tokens, self.adapter.config.language_dim

    @property
    def embed_dim(self) -> int:
        """Width of image and text embeddings."""
        return self.vision.embed_dim

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides any output, as loaded. Save a changed bundle to get its new one."""
        return self._loaded().fingerprint

    @property
    def encoder_fingerprint(self) -> str:
        """sha256 of what decides the stored tokens and embeddings, as loaded."""
        return self._loaded().encoder_fingerprint

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu", dtype: str = "float32", verify: bool = True) -> ModelBundle:
        """Read a bundle.

        Args:
            path: its folder.
            device: where the weights go: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
            dtype: of the joint encoder's matrix products, see `devices.resolve_dtype`.
            verify: compare every file with its hash first.

        Raises:
            ModelError: not a bundle, or a file missing, changed or not fitting; no such device or dtype.
        """
        info = read_bundle_info(path)
        target = resolve_device(device)
        compute_dtype = resolve_dtype(dtype, target)
        if verify:
            verify_files(info)
        config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
        clip = _load_clip(info, config)
        joint = _load_joint(info)
        joint.compute_dtype = compute_dtype
        bundle = cls(
            clip=clip.to(target),
            clip_config=config,
            text_tokenizer=text_tokenizer(config, info.path / VISION_FOLDER),
            adapter=load_adapter(info).to(target),
            joint=joint.to(target),
            trained=info.trained,
            notes=info.notes,
            embedding_weight=info.weights.similarity,
            bank=None if info.bank is None else _load_bank(info, info.bank).to(target),
            prior_weight=info.weights.prior,
            prior_temperature=info.weights.temperature,
            own_caption_weights=info.caption_weights if "caption_weights" in info.joint else None,
            info=info,
        )
        _check_fit(bundle)
        return bundle

    @property
    def weights(self) -> ScoreWeights:
        """Of the final score that images are sorted by for a caption."""
        joint = self.joint
        return ScoreWeights(
            self.embedding_weight, joint.late_weight, joint.pooled_weight, self.prior_weight, self.prior_temperature
        )

    @property
    def caption_weights(self) -> ScoreWeights:
        """Of the one that captions are sorted by for an image."""
        return self.own_caption_weights or self.weights

    def image_priors(self, embeddings: NDArray[np.float32], tokens: torch.Tensor | Array) -> NDArray[np.float32]:
        """What the query bank takes off the scores of images with embeddings [b, e] and stored tokens [b, m, d]: [b].

        The same for every caption; 0 without a bank.
        """
        if self.bank is None or not self.weights.prior:
            return np.zeros(len(embeddings), dtype=np.float32)
        vectors, weights = self.joint.image_vectors(as_tensor(tokens)), self.weights
        priors = self.bank.of_images(torch.from_numpy(embeddings).to(vectors.device), vectors, weights)
        return (weights.prior * priors).numpy(force=True)

    def caption_priors(self, embeddings: NDArray[np.float32], captions: Sequence[str]) -> NDArray[np.float32]:
        """What it takes off the scores of captions with embeddings [b, e], the same for every image: [b]."""
        if self.bank is None or not self.caption_weights.prior:
            return np.zeros(len(embeddings), dtype=np.float32)
        vectors, weights = self.joint.caption_vectors(captions), self.caption_weights
        priors = self.bank.of_captions(torch.from_numpy(embeddings).to(vectors.device), vectors, weights)
        return (weights.prior * priors).numpy(force=True)

    def save(self, path: str | Path, before_commit: Callable[[BundleInfo], None] = lambda info: None) -> BundleInfo:
        """Write the bundle as a new folder, whole or not at all.

        Args:
            path: the folder to make.
            before_commit: called when all is written and nothing is at `path` yet; the description's own path is the
                folder that will be moved there.

        Raises:
            ModelError: the folder exists, or the parts do not fit each other.
        """
        _check_fit(self)
        out = Path(path)
        with new_folder(out) as staging:
            self._write_parts(staging)
            info = self._describe(staging)
            write_json(staging / INFO_FILE, info.to_json())
            read_bundle_info(staging)
            before_commit(info)
        return read_bundle_info(out)

    def _write_parts(self, folder: Path) -> None:
        vision = folder / VISION_FOLDER
        joint = folder / JOINT_FOLDER
        vision.mkdir()
        joint.mkdir()
        self.clip_config.write(vision)
        save_weights(self.clip, folder / VISION_WEIGHTS)
        save_text_tokenizer(self.text_tokenizer, vision)
        if self.clip_config.hf_text_name:
            hf_text: Any = self.clip.text
            hf_text.config.save_pretrained(str(vision / HF_TEXT_FOLDER))
        save_weights(self.adapter, folder / ADAPTER_WEIGHTS)
        save_weights(self.joint, folder / JOINT_WEIGHTS)
        self.joint.tokenizer.save(joint)
        write_json(folder / JOINT_CONFIG, self.joint.config.to_dict())
        if self.bank is not None:
            self.bank.save(folder / BANK_WEIGHTS)

    def _describe(self, folder: Path) -> BundleInfo:
        vision = {
            "name": self.clip_config.name,
            "patch_dim": self.vision.patch_dim,
            "num_patches": self.vision.num_patches,
            "num_heads": self.vision.num_heads,
            "embed_dim": self.vision.embed_dim,
            "image_size": list(self.vision.image_size),
        }
        joint: dict[str, Any] = {"text_embed_dim": self.joint.text_projection.out_features}
        weights = {
            "embedding_weight": self.embedding_weight,
            "late_weight": self.joint.late_weight,
            "pooled_weight": self.joint.pooled_weight,
            "prior_weight": self.prior_weight,
        }
        # Left out where it changes nothing: earlier bundles keep their fingerprints.
        joint.update({name: weight for name, weight in weights.items() if weight})
        if self.prior_weight:
            joint["prior_temperature"] = self.prior_temperature
        if self.own_caption_weights is not None:
            joint["caption_weights"] = self.own_caption_weights._asdict()
        if self.joint.pooled is not None:
            joint["pooled"] = self.joint.pooled.sizes
        if self.bank is not None:
            joint["bank"] = self.bank.sizes
        adapter = self.adapter.config.to_json()
        return describe_bundle(
            folder, vision=vision, adapter=adapter, joint=joint, trained=self.trained, notes=self.notes
        )

    def _loaded(self) -> BundleInfo:
        if self.info is None:
            raise ModelError("a bundle made in memory has no fingerprint yet: save it")
        return self.info


def _load_clip(info: BundleInfo, config: ClipConfig) -> torch.nn.Module:
    clip = build_clip(config, info.path / VISION_FOLDER / HF_TEXT_FOLDER if config.hf_text_name else None)
    weights = info.path / VISION_WEIGHTS
    assign_weights(clip, read_weights(weights), str(weights))
    return clip.requires_grad_(False)


def _load_joint(info: BundleInfo) -> JointEncoder:
    tokenizer = load_joint_tokenizer(info.path / JOINT_FOLDER)
    joint = JointEncoder(bert_config(info.path / JOINT_CONFIG), tokenizer, int(info.joint["text_embed_dim"]))
    if info.pooled is not None:
        joint.pooled = PooledSimilarity(joint.width, **info.pooled)
    weights = info.path / JOINT_WEIGHTS
    assign_weights(joint, read_weights(weights), str(weights))
    joint.late_weight, joint.pooled_weight = info.weights.late, info.weights.pooled
    return joint


def _load_bank(info: BundleInfo, sizes: dict[str, int]) -> QueryBank:
    if BANK_WEIGHTS not in info.files:
        raise ModelError(f"the bundle {info.path} lacks {BANK_WEIGHTS}: copy the whole folder, or make it anew")
    return QueryBank.load(info.path / BANK_WEIGHTS, info.embed_dim, sizes)


def _check_fit(bundle: ModelBundle) -> None:
    """Adapter, tower and joint encoder must have the same widths and counts where they meet."""
    adapter, vision = bundle.adapter.config, bundle.vision
    name = bundle.clip_config.name
    if adapter.vision_dim != vision.patch_dim:
        raise ModelError(
            f"the adapter takes patch tokens of width {adapter.vision_dim}, but the vision tower {name} gives "
            f"width {vision.patch_dim}: name the tower that the adapter was trained with"
        )
    if adapter.kind in (LOCAL, PATCHES) and adapter.num_tokens != vision.num_patches:
        raise ModelError(
            f"a {adapter.kind} adapter stores every patch: {adapter.num_tokens} given, {name} has {vision.num_patches}"
        )
    if adapter.kind in REDUCTIONS and adapter.num_tokens > vision.num_patches:
        raise ModelError(f"cannot keep {adapter.num_tokens} of the {vision.num_patches} patches of {name}")
    if adapter.language_dim != bundle.joint.width and not adapter.is_feature:
        raise ModelError(
            f"the adapter makes tokens of width {adapter.language_dim}, but the joint encoder reads width "
            f"{bundle.joint.width}: take both from the same training run"
        )
    if bundle.bank is not None:
        has, wanted = bundle.bank.sizes["dim"], 0 if bundle.joint.pooled is None else bundle.joint.pooled.sizes["dim"]
        if has != wanted:
            raise ModelError(f"the query bank has pooled vectors of width {has}, the pooled similarity {wanted}")
