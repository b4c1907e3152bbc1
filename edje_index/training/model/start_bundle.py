"""Makes the initial bundle of a training run."""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import ADAPTER_WEIGHTS, INFO_FILE, BundleInfo, encoder_fingerprint
from edje_index.bundles.parts import load_adapter
from edje_index.errors import ModelError
from edje_index.models.adapter import (
    FRAME_EMBEDDINGS,
    LOCAL,
    PATCH_REDUCTIONS,
    PATCHES,
    Adapter,
    AdapterConfig,
    TemporalAdapter,
    build_adapter,
)
from edje_index.models.clip_model import LOCAL_DIR, load_clip
from edje_index.models.joint_encoder import JointEncoder
from edje_index.models.joint_inputs import MAX_TEXT_TOKENS
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.models.weights import save_weights
from edje_index.scoring.weights import DirectionWeights
from edje_index.training.config import ArchitectureConfig
from edje_index.training.model.language_model import load_language_model

NOTES = "start of a training"


@dataclass(frozen=True)
class Origin:
    """The sources of the initial weights.

    Attributes:
        model: bundle that provides the towers; None takes the towers from `vision`.
        vision: open_clip name, or ``local-dir:FOLDER``, of the model that provides the towers.
        language: folder of a Hugging Face BERT model, or a bundle, that provides the joint encoder. None takes the
            joint encoder of `model`.
        init: bundle that provides the joint encoder instead of `language`. If the adapter of this bundle has the
            configuration in the settings, the bundle also provides the adapter.
    """

    model: Path | None
    vision: str | None = None
    language: Path | None = None
    init: Path | None = None


def make_start(origin: Origin, config: ArchitectureConfig, seed: int) -> ModelBundle:
    """Make the initial bundle of a training run. Weights without a source in `origin` are random.

    Raises:
        HubUnreachableError: a source must be downloaded and the Hugging Face Hub cannot be reached.
        ModelError: a source is missing, does not fit the settings, or does not fit another source.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bundle = _towers(origin)
        init = None if origin.init is None else ModelBundle.load(origin.init)
        joint = _joint(origin, bundle, init)
        joint.tokenizer.canonical = config.canonical_captions
        if config.language_layers is not None:
            keep_layers(joint, config.language_layers)
        if joint.text_projection.out_features != bundle.embed_dim:
            joint.text_projection = nn.Linear(joint.width, bundle.embed_dim)
        adapter = _adapter(config, bundle, joint, init)
        extend_positions(joint, MAX_TEXT_TOKENS + adapter.config.num_tokens)
    started = replace(bundle, adapter=adapter, joint=joint, trained=False, notes=NOTES, info=None)
    return replace(started, score=DirectionWeights(), pooled=None, hubness_bank=None)


def make_trainable(bundle: ModelBundle, architecture: ArchitectureConfig, device: torch.device) -> None:
    """Set trainable parameters, dropout and the attention implementation of `bundle` for training on `device`."""
    bundle.adapter.train_weights()
    bundle.joint.requires_grad_(True)
    bundle.joint.text_embeddings.requires_grad_(architecture.word_embeddings == "trained")
    set_dropout(bundle.joint, architecture.dropout, architecture.attention_dropout)
    set_attention(bundle.joint, device)


def feature_fingerprints(info: BundleInfo, trained: AdapterConfig) -> list[str]:
    """Return the encoder fingerprints of indexes that the adapter `trained` can be trained on.

    An index with the first fingerprint contains exactly the inputs of the adapter. If the adapter reduces patches,
    there is a second fingerprint. An index with the second fingerprint contains all patches.
    """
    patches = int(info.vision["num_patches"])
    features = trained.features(patches)
    fingerprints = [_feature_fingerprint(info, _feature_weights(info, trained, patches))]
    if trained.kind in PATCH_REDUCTIONS:
        fingerprints.append(
            _feature_fingerprint(info, build_adapter(replace(features, kind=PATCHES, num_tokens=patches)))
        )
    return fingerprints


def _feature_weights(info: BundleInfo, trained: AdapterConfig, patches: int) -> Adapter:
    """Return the adapter that computes the features of `trained`, the adapter of the bundle `info`."""
    if trained.frame_adapter is None:
        return build_adapter(trained.features(patches))
    return load_adapter(info).features(patches)


def _feature_fingerprint(info: BundleInfo, features: Adapter) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ADAPTER_WEIGHTS
        save_weights(features, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    files = {**info.files, ADAPTER_WEIGHTS: {"sha256": digest}}
    return encoder_fingerprint(features.config.to_json(), files)


def keep_layers(joint: JointEncoder, count: int) -> None:
    """Keep only the first `count` layers of the language model.

    Raises:
        ModelError: the language model has fewer layers.
    """
    layers = joint.language_model.bert.encoder.layer
    if count > len(layers):
        raise ModelError(
            f"cannot keep {count} layers, because the language model has only {len(layers)}; lower "
            "architecture.language_layers"
        )
    joint.language_model.bert.encoder.layer = layers[:count]
    joint.config.num_hidden_layers = count


@torch.no_grad()
def extend_positions(joint: JointEncoder, count: int) -> None:
    """Extend the position table of the language model to at least `count` rows, with copies of the last row."""
    embeddings = joint.language_model.bert.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    if table.num_embeddings >= count:
        return
    rows = torch.arange(count).clamp(max=table.num_embeddings - 1)
    embeddings.position_embeddings = nn.Embedding(count, table.embedding_dim)
    embeddings.position_embeddings.weight.copy_(table.weight[rows])
    joint.config.max_position_embeddings = count


def set_dropout(joint: JointEncoder, hidden: float | None, attention: float | None) -> None:
    """Set the dropout probabilities of hidden states and attention weights. None leaves a probability unchanged.

    The configuration of the language model does not change.
    """
    for name, module in joint.named_modules():
        probability = attention if name.endswith(".self.dropout") else hidden
        if isinstance(module, nn.Dropout) and probability is not None:
            module.p = probability


def set_attention(joint: JointEncoder, device: torch.device) -> None:
    """Choose the attention implementation for training on `device`."""
    # On a CPU, the backward pass of torch's fused attention is slow, so separate matrix products are used.
    if device.type == "cpu":
        joint.language_model.set_attn_implementation("eager")


def _towers(origin: Origin) -> ModelBundle:
    """Load a bundle with the towers. If `origin.model` is None, the adapter of this bundle is a placeholder."""
    if origin.model is not None:
        return ModelBundle.load(origin.model)
    if origin.vision is None or not (origin.language or origin.init):
        raise ModelError("no model provides the towers: set 'model', or set 'vision' and one of 'language' and 'init'")
    clip, config = load_clip(origin.vision)
    folder = Path(origin.vision.removeprefix(LOCAL_DIR)) if origin.vision.startswith(LOCAL_DIR) else None
    vision = vision_tower(clip.visual)  # type: ignore[arg-type]
    source = origin.init or origin.language
    assert source is not None
    joint = _language(source, vision.embed_dim)
    return ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, folder),
        adapter=build_adapter(AdapterConfig(PATCHES, vision.num_patches, vision.patch_dim, vision.patch_dim, 0)),
        joint=joint,
        trained=False,
    )


def _joint(origin: Origin, towers: ModelBundle, init: ModelBundle | None) -> JointEncoder:
    if init is not None:
        return init.joint
    return towers.joint if origin.language is None else _language(origin.language, towers.embed_dim)


def _language(source: Path, embed_dim: int) -> JointEncoder:
    if (source / INFO_FILE).exists():
        return ModelBundle.load(source).joint
    return load_language_model(source, embed_dim)


def _adapter(config: ArchitectureConfig, towers: ModelBundle, joint: JointEncoder, init: ModelBundle | None) -> Adapter:
    vision = towers.vision
    adapter_config = AdapterConfig(
        kind=config.adapter,
        num_tokens=vision.num_patches if config.adapter == LOCAL else config.tokens,
        vision_dim=vision.patch_dim,
        language_dim=joint.width,
        hidden_dim=config.adapter_hidden,
        num_heads=vision.num_heads,
        activation=str(joint.config.hidden_act),
        layer_norm_eps=vision.layer_norm_eps,
    )
    if config.frames is not None:
        adapter_config = _temporal(adapter_config, config.frames, towers)
    if init is not None and init.adapter.config == adapter_config:
        return init.adapter
    adapter = build_adapter(adapter_config)
    if isinstance(adapter, TemporalAdapter) and adapter.frame_adapter is not None:
        adapter.frame_adapter.load_state_dict(towers.adapter.state_dict())
    return adapter


def _temporal(config: AdapterConfig, frames: int, towers: ModelBundle) -> AdapterConfig:
    """Return `config` for clips of `frames` frames. The adapter of `towers` compresses the frames."""
    if config.kind == FRAME_EMBEDDINGS:
        width, frame_adapter = towers.embed_dim, None
    else:
        width, frame_adapter = towers.adapter.config.language_dim, towers.adapter.config
    heads = math.gcd(config.num_heads, width)
    return replace(config, vision_dim=width, num_heads=heads, frames=frames, frame_adapter=frame_adapter)
