"""Model bundles in memory: load, save, and the parts of the final score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

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
from edje_index.bundles.parts import (
    POOLED,
    check_scorer_fit,
    load_adapter,
    load_clip_towers,
    load_hubness_bank,
    load_joint_encoder,
    load_pooled_similarity,
)
from edje_index.errors import ModelError
from edje_index.filesystem import new_folder, write_json
from edje_index.models.adapter import LOCAL, PATCHES, REDUCTIONS, Adapter
from edje_index.models.clip_config import HF_TEXT_FOLDER, ClipConfig, read_clip_config
from edje_index.models.devices import resolve_device, resolve_dtype
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.text_tower import TextTower, save_text_tokenizer, text_tokenizer
from edje_index.models.vision_tower import VisionTower, vision_tower
from edje_index.models.weights import check_finite, distinct_tensors, save_tensors, save_weights
from edje_index.scoring.parts import HubnessBank, PooledSimilarity, ScoreModels
from edje_index.scoring.weights import DirectionWeights


@dataclass
class ModelBundle:
    """A model bundle in memory: towers, adapter, joint encoder and the other parts of the final score.

    Attributes:
        clip: open_clip model with both towers.
        clip_config: configuration of `clip`.
        text_tokenizer: tokenizer of the text tower.
        adapter: maps patch features to tokens.
        joint: joint encoder with a tokenizer.
        trained: False if the weights are random. The scores then have no meaning.
        notes: origin of the weights, as free text.
        score: weights of the final score. By default, the final score is the logit alone.
        pooled: linear maps of the pooled similarity, a part of the final score; None if the bundle has none.
        hubness_bank: bank of the hubness correction; None if the bundle has none.
        info: content of the ``bundle.json`` that was loaded, with the fingerprints of the files; None for a bundle made
            in memory.

    Example:
        >>> from edje_index import ModelBundle
        >>> bundle = ModelBundle.load("model")
        >>> bundle.block_shape, bundle.embed_dim, bundle.trained
        ((4, 16), 24, False)
    """

    clip: torch.nn.Module
    clip_config: ClipConfig
    text_tokenizer: Any
    adapter: Adapter
    joint: JointEncoder
    trained: bool
    notes: str = ""
    score: DirectionWeights = field(default_factory=DirectionWeights)
    pooled: PooledSimilarity | None = None
    hubness_bank: HubnessBank | None = None
    info: BundleInfo | None = None

    @cached_property
    def vision(self) -> VisionTower:
        """The frozen vision tower."""
        return vision_tower(self.clip.visual)  # type: ignore[arg-type]

    @cached_property
    def text(self) -> TextTower:
        """The text tower."""
        return TextTower(self.clip, self.text_tokenizer)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape of a block, (m, d): number of tokens and width of a token."""
        return self.adapter.config.num_tokens, self.adapter.config.language_dim

    @property
    def embed_dim(self) -> int:
        """Width of the embeddings of both towers."""
        return self.vision.embed_dim

    @property
    def score_models(self) -> ScoreModels:
        """The models that compute the parts of the final score."""
        return ScoreModels(self.joint.scorer(), self.pooled, self.hubness_bank)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu", dtype: str = "float32", verify: bool = True) -> ModelBundle:
        """Read a bundle.

        Args:
            path: directory of the bundle.
            device: device of the weights: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto`` is CUDA if torch finds a
                CUDA device, else the CPU.
            dtype: data type of matrix products in the joint encoder, see `devices.resolve_dtype`.
            verify: compare every file with the hash in ``bundle.json`` before loading, and check that all weights are
                finite.

        Raises:
            ModelError: `path` is not a bundle, a file is missing or changed, files do not fit each other, a weight is
                NaN or infinite, or the value of `device` or `dtype` is unknown.
        """
        info = read_bundle_info(path)
        target = resolve_device(device)
        compute_dtype = resolve_dtype(dtype, target)
        if verify:
            verify_files(info)
        config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
        joint = load_joint_encoder(info)
        joint.compute_dtype = compute_dtype
        pooled, bank = load_pooled_similarity(info, joint.width), load_hubness_bank(info)
        bundle = cls(
            clip=load_clip_towers(info, config).to(target),
            clip_config=config,
            text_tokenizer=text_tokenizer(config, info.path / VISION_FOLDER),
            adapter=load_adapter(info).to(target),
            joint=joint.to(target),
            trained=info.trained,
            notes=info.notes,
            score=info.score,
            pooled=None if pooled is None else pooled.to(target),
            hubness_bank=None if bank is None else bank.to(target),
            info=info,
        )
        _check_fit(bundle)
        if verify:
            parts = {VISION_WEIGHTS: bundle.clip, ADAPTER_WEIGHTS: bundle.adapter, JOINT_WEIGHTS: joint}
            for file, module in parts.items():
                check_finite(module.state_dict(), f"{file} in {info.path}")
        return bundle

    def save(self, path: str | Path, before_commit: Callable[[BundleInfo], None] | None = None) -> BundleInfo:
        """Write the bundle to a new directory. If writing fails, `path` does not exist.

        Args:
            path: directory to create.
            before_commit: called with the content of the new ``bundle.json``. At this time, all files are written, but
                `path` does not exist yet.

        Raises:
            ModelError: `path` exists, the parts of the bundle do not fit each other, or a weight is NaN or infinite.
        """
        _check_fit(self)
        out = Path(path)
        with new_folder(out) as staging:
            vision_folder, joint_folder = staging / VISION_FOLDER, staging / JOINT_FOLDER
            vision_folder.mkdir()
            self.clip_config.write(vision_folder)
            save_weights(self.clip, staging / VISION_WEIGHTS)
            save_text_tokenizer(self.text_tokenizer, vision_folder)
            if self.clip_config.hf_text_name:
                hf_text: Any = self.clip.text
                hf_text.config.save_pretrained(str(vision_folder / HF_TEXT_FOLDER))
            save_weights(self.adapter, staging / ADAPTER_WEIGHTS)
            joint_folder.mkdir()
            state = distinct_tensors(self.joint)
            joint: dict[str, Any] = {"text_embed_dim": self.joint.text_projection.out_features}
            if self.joint.tokenizer.canonical:
                joint["canonical_captions"] = True
            if self.pooled is not None:
                state |= {f"{POOLED}{name}": tensor for name, tensor in distinct_tensors(self.pooled).items()}
                joint["pooled_similarity"] = self.pooled.sizes
            save_tensors(state, staging / JOINT_WEIGHTS)
            self.joint.tokenizer.save(joint_folder)
            write_json(staging / JOINT_CONFIG, self.joint.config.to_dict())
            if self.hubness_bank is not None:
                save_weights(self.hubness_bank, staging / BANK_WEIGHTS)
                joint["hubness_bank"] = self.hubness_bank.sizes
            vision = {
                "name": self.clip_config.name,
                "patch_dim": self.vision.patch_dim,
                "num_patches": self.vision.num_patches,
                "num_heads": self.vision.num_heads,
                "embed_dim": self.vision.embed_dim,
                "image_size": list(self.vision.image_size),
            }
            info = describe_bundle(
                BundleInfo(
                    path=staging,
                    vision=vision,
                    adapter=self.adapter.config.to_json(),
                    joint=joint,
                    score=self.score,
                    trained=self.trained,
                    notes=self.notes,
                )
            )
            write_json(staging / INFO_FILE, info.to_json())
            read_bundle_info(staging)
            if before_commit is not None:
                before_commit(info)
        return read_bundle_info(out)


def _check_fit(bundle: ModelBundle) -> None:
    """Raise ModelError if parts of the bundle do not fit each other, or if the score needs a missing part."""
    adapter, vision, name = bundle.adapter.config, bundle.vision, bundle.clip_config.name
    if adapter.vision_dim != vision.patch_dim:
        raise ModelError(
            f"the adapter takes patch features of width {adapter.vision_dim}, but those of the vision tower {name} "
            f"have width {vision.patch_dim}: use the vision tower that the adapter was trained with"
        )
    if adapter.kind in (LOCAL, PATCHES) and adapter.num_tokens != vision.num_patches:
        raise ModelError(
            f"a {adapter.kind} adapter stores one token per patch, but this adapter has "
            f"{adapter.num_tokens} tokens and the vision tower {name} has {vision.num_patches} patches: "
            "use the vision tower that the adapter was trained with"
        )
    if adapter.kind in REDUCTIONS and adapter.num_tokens > vision.num_patches:
        raise ModelError(
            f"a {adapter.kind} adapter cannot keep {adapter.num_tokens} patches, because the vision tower "
            f"{name} has only {vision.num_patches}: use a smaller num_tokens"
        )
    check_scorer_fit(bundle.adapter.config, bundle.score_models, bundle.score)
