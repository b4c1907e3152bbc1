"""Reads SigLIP and SigLIP 2 towers in the format of transformers as open_clip models.

All sizes come from the files ``config.json`` and ``preprocessor_config.json``. For
values that these files leave out, the defaults of transformers are used. The outputs
equal those of ``SiglipModel`` of transformers up to rounding.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import ClipConfig
from edje_index.models.weights import State, assign_weights
from storage_formats.atomic import Json

prepare_torchvision()

import timm  # noqa: E402
from transformers import SiglipConfig  # noqa: E402

# Name of the activation in transformers -> argument `approximate` of nn.GELU
_ACTIVATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
# PIL's number of the bicubic filter, which is the default of transformers
_BICUBIC = 3
# PIL's number of a resampling filter -> open_clip's name of this filter
_FILTERS = {2: "bilinear", _BICUBIC: "bicubic"}
# Each pair is a pattern in the names of weights in transformers, and its replacement in
# open_clip.
_VISION_NAMES = (
    (r"embeddings\.patch_embedding", "patch_embed.proj"),
    (r"embeddings\.position_embedding\.weight", "pos_embed"),
    (r"encoder\.layers", "blocks"),
    (r"\.layer_norm(\d)", r".norm\1"),
    (r"self_attn\.out_proj", "attn.proj"),
    (r"self_attn\.qkv", "attn.qkv"),
    (r"post_layernorm", "norm"),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.out_proj", "attn_pool.proj"),
    (r"head\.layernorm", "attn_pool.norm"),
    (r"head\.", "attn_pool."),
)
_TEXT_NAMES = (
    (r"embeddings\.token_embedding", "token_embedding"),
    (r"embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"encoder\.layers", "transformer.resblocks"),
    (r"\.layer_norm(\d)", r".ln_\1"),
    (r"self_attn\.out_proj", "attn.out_proj"),
    (r"self_attn\.qkv\.", "attn.in_proj_"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"final_layer_norm", "ln_final"),
    (r"^head", "text_projection"),
)
# for each tower, the prefix of its weights in transformers and in open_clip
_TOWERS = (
    ("vision_model.", "visual.trunk.", _VISION_NAMES),
    ("text_model.", "text.", _TEXT_NAMES),
)


def siglip_config(config: Json, processor: Json, name: str) -> ClipConfig:
    """Return the open_clip configuration of SigLIP towers.

    Args:
        config: content of ``config.json``.
        processor: content of ``preprocessor_config.json``.
        name: name of the model. Its tokenizer has the same name.

    Raises:
        ModelError: the configuration is not valid, or open_clip or timm has no tower
            with these sizes.
    """
    siglip = read_siglip(config)
    try:
        vision: Any = siglip.vision_config
        text: Any = siglip.text_config
        activations = [_ACTIVATIONS[each.hidden_act] for each in (vision, text)]
        resize = _FILTERS[int(processor.get("resample", _BICUBIC))]
        size = int(vision.image_size)
        model = {
            "embed_dim": int(text.projection_size),
            "init_logit_bias": -10,
            "custom_text": True,
            "vision_cfg": {
                "image_size": size,
                "timm_model_name": _timm_name(vision),
                "timm_model_pretrained": False,
                "timm_pool": "map",
                "timm_proj": "none",
                "act_kwargs": {"approximate": activations[0]},
            },
            "text_cfg": {
                "context_length": int(text.max_position_embeddings),
                "vocab_size": int(text.vocab_size),
                "hf_tokenizer_name": name,
                "tokenizer_kwargs": {"clean": "canonicalize"},
                "width": int(text.hidden_size),
                "heads": int(text.num_attention_heads),
                "layers": int(text.num_hidden_layers),
                "mlp_ratio": text.intermediate_size / text.hidden_size,
                "no_causal_mask": True,
                "proj_bias": True,
                "pool_type": "last",
                "norm_kwargs": {"eps": float(text.layer_norm_eps)},
                "act_kwargs": {"approximate": activations[1]},
            },
        }
        preprocess = {
            "size": [size, size],
            "mean": list(processor.get("image_mean", [0.5] * 3)),
            "std": list(processor.get("image_std", [0.5] * 3)),
            "interpolation": resize,
            "resize_mode": "squash",
        }
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the configuration of {name} describes towers that this version does not"
            f" support: {error!r:.300}; give SigLIP or SigLIP 2 towers of a fixed image"
            " size"
        ) from error
    return ClipConfig(name.rpartition("/")[2], model, preprocess)


def load_siglip(clip: nn.Module, state: State, source: str) -> None:
    """Copy the weights `state` of a ``SiglipModel`` of transformers into the open_clip
    model `clip`. A tower without weights in `state` does not change.

    Raises:
        ModelError: a tensor is missing, or has another size.
    """
    for prefix, target, names in _TOWERS:
        tower = {
            key.removeprefix(prefix): tensor
            for key, tensor in state.items()
            if key.startswith(prefix) and not key.endswith(".position_ids")
        }
        if not tower:
            continue
        module = clip.get_submodule(target.removesuffix("."))
        expected = module.state_dict()
        weights = _open_clip_weights(tower, names)
        for name, tensor in weights.items():
            # Position tables have one more axis in timm than in transformers.
            if name in expected and tensor.numel() == expected[name].numel():
                weights[name] = tensor.reshape(expected[name].shape)
        assign_weights(module, weights, f"the tower {prefix}* of {source}")


def towers_in(state: State) -> set[str]:
    """Return the names of the towers that `state` has weights of: "vision_model",
    "text_model", both or neither.
    """
    return {
        name
        for name in ("vision_model", "text_model")
        if f"{name}.encoder.layers.0.mlp.fc1.weight" in state
    }


def read_siglip(config: Json) -> SiglipConfig:
    """Return the configuration of the towers that `config` describes. `config` is the
    content of ``config.json``.

    Raises:
        ModelError: `config` does not describe SigLIP towers.
    """
    try:
        if config.get("model_type") != "siglip":
            raise ValueError(f"model_type is {config.get('model_type')!r}")
        # The method `from_dict` is not used, because it warns about token ids of the
        # default configuration.
        return SiglipConfig(**config)
    except Exception as error:
        # The checks of transformers raise exceptions of several libraries, so all
        # exceptions are caught.
        raise ModelError(
            f"config.json describes no SigLIP towers: {error!s:.300}; give towers of"
            " open_clip, or SigLIP or SigLIP 2 towers of a fixed image size"
        ) from error


def _timm_name(vision: Any) -> str:
    """Return the name that timm gives to a vision tower with the sizes in `vision`.

    Raises:
        ModelError: timm has no such tower.
    """
    pattern = f"vit_*_patch{vision.patch_size}_siglip_{vision.image_size}"
    sizes = (
        vision.hidden_size,
        vision.num_hidden_layers,
        vision.num_attention_heads,
        vision.intermediate_size,
        vision.layer_norm_eps,
    )
    for name in timm.list_models(pattern):
        with torch.device("meta"):
            trunk: Any = timm.create_model(name, num_classes=0)
        first = trunk.blocks[0]
        if sizes == (
            trunk.num_features,
            len(trunk.blocks),
            first.attn.num_heads,
            first.mlp.fc1.out_features,
            trunk.norm.eps,
        ):
            return str(name)
    raise ModelError(
        f"timm has no SigLIP tower {pattern} with the width, layers, heads, hidden"
        f" width and epsilon {sizes}: upgrade timm, or convert the towers to open_clip"
    )


def _open_clip_weights(tower: State, renames: tuple[tuple[str, str], ...]) -> State:
    """Return the weights of a tower with the names of open_clip.

    open_clip joins the weights of query, key and value in one tensor. In the pooling
    head, it separates the weights of the query, which transformers joins with the
    others.
    """
    result = {}
    for key, tensor in tower.items():
        parts = {key: tensor}
        if match := re.fullmatch(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)", key):
            # The weights of key and value are joined to those of the query.
            if match[2] != "q":
                continue
            joined = [
                tower.get(f"{match[1]}{part}_proj.{match[3]}", tensor) for part in "qkv"
            ]
            parts = {f"{match[1]}qkv.{match[3]}": torch.cat(joined)}
        elif match := re.fullmatch(r"(head\.)attention\.in_proj_(weight|bias)", key):
            width = len(tensor) // 3
            parts = {
                f"{match[1]}q.{match[2]}": tensor[:width],
                f"{match[1]}kv.{match[2]}": tensor[width:],
            }
        for name, value in parts.items():
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            result[name] = value
    return result
