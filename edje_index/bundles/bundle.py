"""Model bundles in memory: load and save whole bundles, and load single parts.

Importing this module, or loading a part, imports only the libraries that are needed. A
search for a caption with a BERT text tower imports neither open_clip nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    INFO_FILE,
    JOINT_CONFIG,
    JOINT_FOLDER,
    JOINT_WEIGHTS,
    OFFSET_FILE,
    OFFSET_TENSOR,
    VISION_FOLDER,
    VISION_WEIGHTS,
    BundleInfo,
    describe_bundle,
    read_bundle_info,
    read_bundle_offset,
    verify_files,
)
from edje_index.errors import ModelError
from edje_index.models.adapter import (
    LOCAL,
    PATCHES,
    REDUCTIONS,
    Adapter,
    AdapterConfig,
    build_adapter,
)
from edje_index.models.clip_config import (
    CONFIG_FILE,
    HF_TEXT_FOLDER,
    ClipConfig,
    read_clip_config,
)
from edje_index.models.devices import plain_torch, resolve_device, resolve_dtype
from edje_index.models.filesystem import new_folder, write_json
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.models.safety import read_configuration
from edje_index.models.weights import (
    assign_weights,
    check_finite,
    distinct_tensors,
    limited_by,
    load_module,
    read_weights,
    save_tensors,
    save_weights,
)
from edje_index.scoring.parts import PooledSimilarity, Scorer
from edje_index.scoring.weights import DirectionWeights, check_parts
from storage_formats.arguments import repr_of
from storage_formats.atomic import Json
from storage_formats.format.offset import Offset

if TYPE_CHECKING:
    from edje_index.models.joint_encoder import JointEncoder
    from edje_index.models.text_tower import TextEncoder, TextTower
    from edje_index.models.vision_tower import VisionTower

POOLED = "pooled."


@dataclass(repr=False)
class ModelBundle:
    """A model bundle in memory: towers, adapter, joint encoder and the other parts of
    the final score.

    Attributes:
        clip: open_clip model with both towers.
        clip_config: configuration of `clip`.
        text_tokenizer: tokenizer of the text tower.
        adapter: maps patch features to tokens.
        joint: joint encoder with a tokenizer.
        trained: False if the weights are random. The scores then have no meaning.
        notes: origin of the weights, as free text.
        score: weights of the final score. By default, the final score is the logit
            alone.
        pooled: linear maps of the pooled similarity, a part of the final score; None if
            the bundle has none.
        logit_range, pool: see `BundleInfo`.
        offset: offset block for new indexes, see `read_bundle_offset`; None if the
            bundle has none.
        info: content of the ``bundle.json`` that was loaded, with the fingerprints of
            the files; None for a bundle made in memory.

    Examples:
        >>> from edje_index import ModelBundle
        >>> bundle = ModelBundle.load("model")
        >>> bundle.block_shape, bundle.embed_dim, bundle.trained
        ((4, 16), 24, False)
    """

    clip: nn.Module
    clip_config: ClipConfig
    text_tokenizer: Any
    adapter: Adapter
    joint: JointEncoder
    trained: bool
    notes: str = ""
    score: DirectionWeights = field(default_factory=DirectionWeights)
    pooled: PooledSimilarity | None = None
    logit_range: tuple[float, float] | None = None
    pool: int | None = None
    offset: Offset | None = None
    info: BundleInfo | None = None

    @cached_property
    def vision(self) -> VisionTower:
        """The frozen vision tower."""
        from edje_index.models.vision_tower import vision_tower

        return vision_tower(self.clip.visual, self.clip_config.embed_dim)

    @cached_property
    def text(self) -> TextTower:
        """The text tower."""
        from edje_index.models.text_tower import TextTower

        tower = TextTower(self.clip, self.text_tokenizer)
        tower.canonical = self.joint.tokenizer.canonical
        return tower

    __repr__ = repr_of("block_shape", "embed_dim", "trained", "notes")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape of a block, (m, d): number of tokens and width of a token."""
        return self.adapter.config.num_tokens, self.adapter.config.language_dim

    @property
    def embed_dim(self) -> int:
        """Width of the embeddings of both towers."""
        return self.vision.embed_dim

    @property
    def scorer(self) -> Scorer:
        """The models that compute the parts of the final score."""
        return Scorer(self.joint.scorer(), self.pooled)

    @classmethod
    @plain_torch()
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        verify: bool = True,
    ) -> ModelBundle:
        """Read a bundle.

        Args:
            path: directory of the bundle.
            device: device of the weights: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
                ``auto`` is CUDA if torch finds a CUDA device, else the CPU.
            dtype: data type of matrix products in the joint encoder, see
                `edje_index.models.devices.resolve_dtype`.
            verify: compare every file with the hash in ``bundle.json`` before loading,
                and check that all weights are finite.

        Raises:
            ModelError: `path` is not a bundle, a file is missing or changed, files do
                not fit each other, a weight is NaN or infinite, or the value of
                `device` or `dtype` is unknown.
        """
        from edje_index.models.text_tower import text_tokenizer

        info = read_bundle_info(path)
        target = resolve_device(device)
        compute_dtype = resolve_dtype(dtype, target)
        if verify:
            verify_files(info)
        config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
        joint = load_joint_encoder(info)
        joint.compute_dtype = compute_dtype
        bundle = cls(
            clip=load_clip_towers(info, config).to(target),
            clip_config=config,
            text_tokenizer=text_tokenizer(config, info.path / VISION_FOLDER),
            adapter=load_adapter(info).to(target),
            joint=joint.to(target),
            trained=info.trained,
            notes=info.notes,
            score=info.score,
            pooled=load_pooled_similarity(info, joint.width, target),
            logit_range=info.logit_range,
            pool=info.pool,
            offset=read_bundle_offset(info),
            info=info,
        )
        _check_fit(bundle)
        if verify:
            parts = {
                VISION_WEIGHTS: bundle.clip,
                ADAPTER_WEIGHTS: bundle.adapter,
                JOINT_WEIGHTS: joint,
            }
            for file, module in parts.items():
                check_finite(module.state_dict(), f"{file} in {info.path}")
        return bundle

    def save(
        self,
        path: str | Path,
        before_commit: Callable[[BundleInfo], None] | None = None,
    ) -> BundleInfo:
        """Write the bundle to a new directory. If writing fails, `path` is not created.

        Args:
            path: directory to create.
            before_commit: called with the content of the new ``bundle.json``. At this
                time, all files are written, but `path` does not exist yet.

        Raises:
            ModelError: `path` exists, the parts of the bundle do not fit each other, or
                a weight is NaN or infinite.
        """
        from edje_index.models.text_tower import save_text_tokenizer

        _check_fit(self)
        out = Path(path)
        with new_folder(out) as staging:
            vision_folder = staging / VISION_FOLDER
            joint_folder = staging / JOINT_FOLDER
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
            joint: Json = {"text_embed_dim": self.joint.text_projection.out_features}
            if self.joint.tokenizer.canonical:
                joint["canonical_captions"] = True
            if self.pooled is not None:
                state |= {
                    f"{POOLED}{name}": tensor
                    for name, tensor in distinct_tensors(self.pooled).items()
                }
                joint["pooled_similarity"] = self.pooled.sizes
            save_tensors(state, staging / JOINT_WEIGHTS)
            self.joint.tokenizer.save(joint_folder)
            write_json(staging / JOINT_CONFIG, self.joint.config.to_dict())
            if self.offset is not None:
                tensors = {OFFSET_TENSOR: torch.from_numpy(self.offset)}
                save_tensors(tensors, staging / OFFSET_FILE)
            if self.logit_range is not None:
                joint["logit_range"] = list(self.logit_range)
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
                    adapter=asdict(self.adapter.config),
                    joint=joint,
                    score=self.score,
                    trained=self.trained,
                    notes=self.notes,
                    pool=self.pool,
                )
            )
            write_json(staging / INFO_FILE, info.to_json())
            read_bundle_info(staging)
            if before_commit is not None:
                before_commit(info)
        return read_bundle_info(out)


def _check_fit(bundle: ModelBundle) -> None:
    """Raise ModelError if parts of the bundle do not fit each other, or if the final
    score needs a part that the bundle lacks.
    """
    from edje_index.images.preprocessing import Preprocessor

    adapter = bundle.adapter.config
    vision = bundle.vision
    name = bundle.clip_config.name
    if adapter.vision_dim != vision.patch_dim:
        raise ModelError(
            f"the adapter takes patch features of width {adapter.vision_dim}, but those"
            f" of the vision tower {name} have width {vision.patch_dim}: use the vision"
            " tower that the adapter was trained with"
        )
    # Adapters of these two kinds make one token per patch.
    keeps_all = adapter.kind in (LOCAL, PATCHES)
    if (keeps_all and adapter.num_tokens != vision.num_patches) or (
        adapter.kind in REDUCTIONS and adapter.num_tokens > vision.num_patches
    ):
        raise ModelError(
            f"a {adapter.kind} adapter of {adapter.num_tokens} tokens does not fit the"
            f" vision tower {name}, which has {vision.num_patches} patches: use the"
            " vision tower that the adapter was trained with"
        )
    try:
        preprocess = Preprocessor(bundle.clip_config)
        fits = preprocess.shape[1:] == vision.image_size
        fits = fits and bool((preprocess.scale[2] > 0).all())
    except (AssertionError, LookupError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ModelError(
            f"the preprocessing {bundle.clip_config.preprocess} does not give the"
            f" vision tower {name} images of {vision.image_size} pixels: restore"
            f" preprocess_cfg in {CONFIG_FILE}"
        )
    check_scorer_fit(bundle.adapter.config, bundle.scorer, bundle.score)


def load_clip_towers(info: BundleInfo, config: ClipConfig) -> nn.Module:
    """Load the open_clip model with both towers, frozen, onto the CPU."""
    from edje_index.models.clip_model import build_clip

    hf_text = (
        info.path / VISION_FOLDER / HF_TEXT_FOLDER if config.hf_text_name else None
    )
    return load_module(
        info.path / VISION_WEIGHTS, lambda: build_clip(config, hf_text)
    ).requires_grad_(False)


@plain_torch()
def load_text_tower(info: BundleInfo, device: torch.device) -> TextEncoder:
    """Load the text tower of a bundle onto `device`. A BERT text tower is loaded
    without open_clip.
    """
    from edje_index.models.text_tower import (
        TextTower,
        load_bert_text_tower,
        text_tokenizer,
    )

    folder = info.path / VISION_FOLDER
    config = read_clip_config(folder, info.vision_name)
    tower: TextEncoder | None = load_bert_text_tower(folder, config, device)
    tower = tower or TextTower(
        load_clip_towers(info, config).to(device), text_tokenizer(config, folder)
    )
    tower.canonical = info.canonical_captions
    return tower


def load_visual(info: BundleInfo) -> tuple[VisionTower, ClipConfig]:
    """Load the vision tower of a bundle, and the configuration of the open_clip
    model.
    """
    from edje_index.models.clip_model import build_visual
    from edje_index.models.vision_tower import vision_tower

    config = read_clip_config(info.path / VISION_FOLDER, info.vision_name)
    visual = load_module(
        info.path / VISION_WEIGHTS, lambda: build_visual(config), prefix="visual."
    )
    return vision_tower(visual, config.embed_dim), config


def load_adapter(info: BundleInfo) -> Adapter:
    """Load the adapter of a bundle, with frozen weights."""
    config = AdapterConfig.from_json(info.adapter, info.path / INFO_FILE)
    return load_module(
        info.path / ADAPTER_WEIGHTS, lambda: build_adapter(config)
    ).requires_grad_(False)


def load_joint_encoder(info: BundleInfo) -> JointEncoder:
    """Load the joint encoder of a bundle as a module that can be trained."""
    from edje_index.models.joint_encoder import JointEncoder, bert_config

    tokenizer = load_joint_tokenizer(
        info.path / JOINT_FOLDER, canonical=info.canonical_captions
    )
    path = info.path / JOINT_WEIGHTS
    with limited_by(path):
        joint = JointEncoder(
            bert_config(info.path / JOINT_CONFIG),
            tokenizer,
            int(info.joint["text_embed_dim"]),
        )
    state = {
        name: tensor
        for name, tensor in read_weights(path).items()
        if not name.startswith(POOLED)
    }
    assign_weights(joint, state, str(path))
    return joint


@plain_torch()
def load_scorer(info: BundleInfo, dtype: torch.dtype, device: torch.device) -> Scorer:
    """Load the models that compute the parts of the final score onto `device`."""
    folder = info.path / JOINT_FOLDER
    joint = JointScorer(
        load_joint_tokenizer(folder, canonical=info.canonical_captions),
        read_configuration(info.path / JOINT_CONFIG),
        read_weights(info.path / JOINT_WEIGHTS),
        source=str(folder),
        dtype=dtype,
        device=device,
    )
    return Scorer(joint, load_pooled_similarity(info, joint.width, device))


def load_pooled_similarity(
    info: BundleInfo, width: int, device: torch.device
) -> PooledSimilarity | None:
    """Load the pooled similarity of a bundle onto `device`. Return None if the bundle
    has none.

    Args:
        info: description of the bundle.
        width: width of the joint encoder.
        device: device of the weights.
    """
    sizes = info.pooled_similarity
    if sizes is None:
        return None
    return load_module(
        info.path / JOINT_WEIGHTS,
        lambda: PooledSimilarity(width, **sizes),
        prefix=POOLED,
    ).to(device)


def check_scorer_fit(
    adapter: AdapterConfig, models: Scorer, score: DirectionWeights
) -> None:
    """Check that the adapter, the models that compute the parts of the final score, and
    the weights of the final score fit together.

    Raises:
        ModelError: they do not fit together.
    """
    if adapter.language_dim != models.joint.width and not adapter.is_feature:
        raise ModelError(
            f"the adapter makes tokens of width {adapter.language_dim}, but the joint"
            f" encoder reads tokens of width {models.joint.width}: use an adapter and a"
            " joint encoder of the same training run"
        )
    for weights in (score.t2i, score.i2t):
        check_parts(weights, models.part_names, "the bundle")


def write_feature_bundle(
    towers: str | Path,
    out: str | Path,
    kind: Literal["patches", "strided", "clustered", "pruned"] = "patches",
    tokens: int | None = None,
) -> BundleInfo:
    """Write a bundle with the towers of another bundle and an adapter without weights.
    An index that the new bundle builds is the data set of a training run.

    Args:
        towers: directory of the bundle with the towers.
        out: directory to create.
        kind: what to store. "patches" stores the features of all patches, on which
            compressed and local adapters are trained. "strided", "clustered" and
            "pruned" store reduced patches, on which adapters of the same kind are
            trained.
        tokens: number of reduced patches per image.

    Raises:
        ModelError: `towers` cannot be read, the arguments do not fit each other, or
            `out` exists.

    Examples:
        >>> from edje_index import write_feature_bundle
        >>> write_feature_bundle("model", "patches").block_shape
        (16, 32)
    """
    bundle = ModelBundle.load(towers)
    width = bundle.vision.patch_dim
    count = bundle.vision.num_patches if tokens is None else tokens
    features = replace(
        bundle,
        adapter=build_adapter(AdapterConfig(kind, count, width, width, hidden_dim=0)),
        trained=True,
        notes="stores features to train on; it cannot re-rank",
        score=DirectionWeights(),
        pooled=None,
        logit_range=None,
        offset=None,
        info=None,
    )
    return features.save(out)
