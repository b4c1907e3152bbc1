"""Makes the initial weights of a training run. The queries of a new adapter start at
cluster centres of patch features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.errors import ModelError
from edje_index.models.adapter import (
    LOCAL,
    Adapter,
    AdapterConfig,
    CompressionAdapter,
    ReducedAdapter,
    build_adapter,
    cluster_tokens,
)
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import MAX_TEXT_TOKENS, load_joint_tokenizer
from edje_index.models.weights import check_finite, one_line
from edje_index.training.batches import CLUSTERING, stream
from edje_index.training.config import ArchitectureConfig
from edje_index.training.dataset import TrainingData

# number of sample images whose patches are clustered, and largest number of patches
_SAMPLE_IMAGES = 300
_SAMPLE_PATCHES = 20_000
# Standard deviation over patches of the initial attention scores. If the score of a
# patch is one standard deviation higher, its attention weight is e**4 times higher.
_SHARPNESS = 4.0


def make_start(
    architecture: ArchitectureConfig,
    seed: int,
    model: Path,
    *,
    language: Path | None = None,
    init: Path | None = None,
    sample: TrainingData | None = None,
) -> ModelBundle:
    """Make the initial bundle of a training run. Weights that none of the given models
    provides are random, and depend on `seed`.

    Args:
        model: bundle that provides the towers.
        language: folder of a Hugging Face BERT model that provides the joint encoder.
            None takes the joint encoder of `model`.
        init: bundle that provides the joint encoder instead of `language`, and the
            pooled similarity. If the adapter of this bundle has the configuration in
            the settings, the bundle also provides the adapter and the weights of the
            final score.
        sample: images from whose patch features the queries of a new compressed adapter
            are made, see `init_queries`. With None, the queries are random.

    Raises:
        ModelError: the language model has fewer layers than `architecture` keeps, or a
            model cannot be read.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        towers = ModelBundle.load(model)
        tower = towers.vision
        joint = towers.joint
        initial = None if init is None else ModelBundle.load(init)
        if initial is not None:
            joint = initial.joint
        elif language is not None:
            joint = load_language_model(language, tower.embed_dim)
        joint.tokenizer.canonical = architecture.canonical_captions
        if (count := architecture.language_layers) is not None:
            layers = joint.language_model.bert.encoder.layer
            if count > len(layers):
                raise ModelError(
                    f"cannot keep {count} layers, because the language model has only"
                    f" {len(layers)}; lower architecture.language_layers"
                )
            joint.language_model.bert.encoder.layer = layers[:count]
            joint.config.num_hidden_layers = count
        if joint.text_projection.out_features != tower.embed_dim:
            joint.text_projection = nn.Linear(joint.width, tower.embed_dim)
        config = AdapterConfig(
            kind=architecture.adapter,
            num_tokens=(
                tower.num_patches
                if architecture.adapter == LOCAL
                else architecture.tokens
            ),
            vision_dim=tower.patch_dim,
            language_dim=joint.width,
            hidden_dim=architecture.adapter_hidden,
            num_heads=tower.num_heads,
            activation=str(joint.config.hidden_act),
            layer_norm_eps=tower.layer_norm_eps,
        )
        if initial is not None and initial.adapter.config == config:
            adapter = initial.adapter
        else:
            adapter = build_adapter(config)
            if sample is not None and isinstance(adapter, CompressionAdapter):
                order = stream(seed, CLUSTERING).permutation(sample.images)
                patches = sample.blocks(np.sort(order[:_SAMPLE_IMAGES]))
                init_queries(adapter, patches, torch.Generator().manual_seed(seed))
        embeddings = joint.language_model.bert.embeddings
        count = MAX_TEXT_TOKENS + adapter.config.num_tokens
        table: nn.Embedding = embeddings.position_embeddings
        # An input row with image tokens may need more positions than the language model
        # has. The embeddings of the additional positions are copies of the last one.
        if table.num_embeddings < count:
            embeddings.position_embeddings = nn.Embedding(count, table.embedding_dim)
            rows = torch.arange(count).clamp(max=table.num_embeddings - 1)
            with torch.no_grad():
                embeddings.position_embeddings.weight.copy_(table.weight[rows])
            joint.config.max_position_embeddings = count
    start = ModelBundle(
        clip=towers.clip,
        clip_config=towers.clip_config,
        text_tokenizer=towers.text_tokenizer,
        adapter=adapter,
        joint=joint,
        trained=False,
        notes="start of a training",
    )
    if initial is not None:
        start.pooled = initial.pooled
        # The weights were fitted to tokens of the initial adapter.
        if adapter is initial.adapter:
            start.score = initial.score
    return start


def load_language_model(folder: Path, embed_dim: int) -> JointEncoder:
    """Return a joint encoder with the weights of the BERT model in `folder`, in
    float32.

    ``<image>`` is appended to the vocabulary. A language-model head in `folder` is
    loaded too. The scoring head, with its pooler, is random, as in the published code.

    Args:
        folder: folder with ``config.json``, ``model.safetensors`` (or
            ``pytorch_model.bin``) and the tokenizer.
        embed_dim: width of the text embeddings that the joint encoder learns to
            recover.
    """
    from transformers import BertForMaskedLM

    tokenizer = load_joint_tokenizer(folder)
    config = bert_config(folder / "config.json")
    try:
        loaded: Any = BertForMaskedLM.from_pretrained(
            folder, config=config, output_loading_info=True
        )
        model, loading = loaded
        # If the file has no language-model head, the head keeps its random weights.
        missing = [
            name for name in loading["missing_keys"] if not name.startswith("cls.")
        ]
        if missing:
            raise ModelError(f"the tensor {missing[0]} is missing")
    except Exception as error:
        raise ModelError(
            f"cannot read the weights in {folder}: {one_line(error)}; give the"
            " directory of a BERT model"
        ) from error
    words = max(config.vocab_size, len(tokenizer))
    model.resize_token_embeddings(words, mean_resizing=False)
    joint = JointEncoder(model.config, tokenizer, embed_dim)
    joint.language_model.load_state_dict(model.state_dict())
    check_finite(joint.state_dict(), str(folder))
    return joint


def make_trainable(
    bundle: ModelBundle, architecture: ArchitectureConfig, device: torch.device
) -> None:
    """Set the trainable parameters, the dropout and the attention implementation of
    `bundle` for training on `device`.

    The sizes and the dropout in the configuration of the language model do not change.
    """
    bundle.adapter.requires_grad_(True)
    bundle.joint.requires_grad_(True)
    bundle.joint.text_embeddings.requires_grad_(
        architecture.word_embeddings == "trained"
    )
    for module in bundle.joint.modules():
        if isinstance(module, nn.Dropout) and architecture.dropout is not None:
            module.p = architecture.dropout
    # On a CPU, the backward pass of torch's fused attention is slow, so separate matrix
    # products are used.
    if device.type == "cpu":
        bundle.joint.language_model.set_attn_implementation("eager")


def trained_part(adapter: Adapter) -> nn.Module:
    """Return the module of `adapter` that is trained.

    For an adapter that reduces patches, this module is the MLP, because training reads
    reduced features. For any other adapter, it is the whole adapter.
    """
    return adapter.local if isinstance(adapter, ReducedAdapter) else adapter


@torch.no_grad()
def init_queries(
    adapter: CompressionAdapter, patches: Tensor, generator: torch.Generator
) -> None:
    """Set the queries and attention weights of `adapter` from sample patches. The other
    weights do not change.

    The queries start at cluster centres of the patches, so each token is a weighted
    mean of similar patches, as in NetVLAD (Arandjelovic et al., 2016). With random
    queries, every token is close to the mean of all patches.

    Args:
        patches: patch features of sample images [b, n, d_v]. If b * n is less than the
            number of tokens per image, or all patches are equal, nothing changes.
        generator: random number generator that selects the patches to cluster.
    """
    width = adapter.config.vision_dim
    heads = adapter.config.num_heads
    points = patches.reshape(-1, width).float()
    points = points[torch.randperm(len(points), generator=generator)[:_SAMPLE_PATCHES]]
    mean = points.mean(dim=0)
    points = points - mean
    if len(points) < adapter.config.num_tokens or not points.any():
        return
    centres = cluster_tokens(points[None], adapter.config.num_tokens)[0]
    by_head = [
        part.view(len(part), heads, -1).transpose(0, 1) for part in (centres, points)
    ]
    scores = by_head[0] @ by_head[1].transpose(1, 2) / (width // heads) ** 0.5
    adapter.query.copy_(centres * (_SHARPNESS / scores.std(dim=2).mean()))
    # With these weights, the attention score of a patch is its scaled dot product with
    # a query. The result of the attention is a weighted mean of patches, from which the
    # mean of all patches is subtracted.
    identity = torch.eye(width)
    for linear in (adapter.key, adapter.value, adapter.attention.out_proj):
        linear.weight.copy_(identity)
        linear.bias.zero_()
    adapter.value.bias.copy_(-mean)
    adapter.attention.in_proj_weight.copy_(torch.cat([identity, identity, identity]))
    adapter.attention.in_proj_bias.zero_()
