"""Compares the frozen SigLIP towers in a published checkpoint with the towers of an open_clip model.

The sizes must be equal. The weights must be equal up to rounding.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from edje_index.errors import ModelError
from edje_index.models.vision_tower import VisionTower
from edje_index.models.weights import State

OPEN_CLIP_NAMES = {
    "google/siglip2-base-patch16-224": "ViT-B-16-SigLIP2:webli",
    "google/siglip2-base-patch16-384": "ViT-B-16-SigLIP2-384:webli",
    "google/siglip2-large-patch16-256": "ViT-L-16-SigLIP2-256:webli",
    "google/siglip2-large-patch16-384": "ViT-L-16-SigLIP2-384:webli",
}
"""open_clip's name of each tower that the published code supports, by the name on the Hugging Face hub."""

BERT_POSITIONS = 512
_TEXT_POSITIONS = 64  # positions in a row for [CLS], caption and both [SEP]
_LAYERS = "encoder.layers."
_ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
_Renames = tuple[tuple[str, str], ...]
_VISION_NAMES: _Renames = (
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
_TEXT_NAMES: _Renames = (
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


def check_tower_size(tower: VisionTower, name: str, siglip_path: str | None, positions: int, *, local: bool) -> None:
    """Check that `tower` has the number of patches that the checkpoint was trained with.

    Args:
        tower: vision tower of the open_clip model.
        name: name of `tower`, for error messages.
        siglip_path: name of the tower in the checkpoint, such as ``google/siglip2-large-patch16-384``; None if the
            checkpoint does not name a tower.
        positions: number of rows in the position table of the checkpoint. For a local adapter on n patches, the
            published code uses max(512, 64 + n) rows.
        local: True if the adapter in the checkpoint is a local adapter.

    Raises:
        ModelError: the numbers of patches differ.
    """
    match = re.search(r"patch(\d{1,3})-(\d{1,4})$", siglip_path or "")
    if match and int(match[1]):
        patches = (int(match[2]) // int(match[1])) ** 2
        if patches != tower.num_patches:
            raise ModelError(
                f"the checkpoint was trained with {siglip_path}, which has {patches} patches, but {name} has "
                f"{tower.num_patches} patches: give the tower that the checkpoint was trained with"
            )
    if local and positions > BERT_POSITIONS and positions != tower.num_patches + _TEXT_POSITIONS:
        raise ModelError(
            f"the checkpoint was trained with a tower of {positions - _TEXT_POSITIONS} patches, but "
            f"{name} has {tower.num_patches} patches: give the tower that the checkpoint was trained with"
        )


def check_same_towers(state: State, clip: nn.Module, name: str) -> None:
    """Check that the towers of a checkpoint equal the towers of `clip`. A checkpoint without towers is accepted.

    Args:
        state: weights of the checkpoint by name.
        clip: open_clip model.
        name: name of the open_clip model, for error messages.

    Raises:
        ModelError: a tower of the checkpoint has another size or other weights than the same tower of `clip`.
    """
    weights = dict(clip.state_dict())
    for prefix, target, renames in (
        ("vision_encoder.", "visual.trunk.", _VISION_NAMES),
        ("clip.vision_model.", "visual.trunk.", _VISION_NAMES),
        ("clip.text_model.", "text.", _TEXT_NAMES),
    ):
        tower = {
            key.removeprefix(prefix).removeprefix("vision_model."): tensor
            for key, tensor in state.items()
            if key.startswith(prefix)
        }
        if any(key.startswith(_LAYERS) for key in tower):
            renamed = {f"{target}{key}": tensor for key, tensor in _open_clip_weights(tower, renames).items()}
            expected = {key: tensor for key, tensor in weights.items() if key.startswith(target)}
            _check_same(renamed, expected, prefix.removesuffix("."), name)


def _check_same(tower: State, expected: State, what: str, name: str) -> None:
    layers = {key for key in expected if "blocks." in key}
    for key in sorted(tower.keys() | layers):
        sizes = [weights[key].numel() if key in weights else 0 for weights in (tower, expected)]
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"{name} is not the tower of the checkpoint: {what}.{key} has {sizes[0]} values in the checkpoint and "
                f"{sizes[1]} in {name}; give the tower that the checkpoint was trained with"
            )
        tolerance = _ROUNDING.get(tower[key].dtype, 1e-5)
        ours = expected[key].float().flatten()
        if not torch.allclose(tower[key].float().flatten(), ours, rtol=tolerance, atol=1e-6):
            raise ModelError(
                f"the tower {what}.* in the checkpoint differs from {name} in the weights {key}: give the open_clip "
                "model that the checkpoint was trained with. If the tower was fine-tuned, convert the tower to an "
                "open_clip model, and give this model as local-dir:DIRECTORY"
            )


def _open_clip_weights(tower: State, renames: _Renames) -> State:
    result = {}
    for key, tensor in _joined(tower).items():
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        result[key] = tensor
    return result


def _joined(tower: State) -> State:
    """Join the weights of query, key and value in one tensor, as in open_clip."""
    result = {}
    for key, tensor in tower.items():
        if match := re.fullmatch(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)", key):
            if match[2] == "q":
                parts = [tower.get(f"{match[1]}{part}_proj.{match[3]}", tensor) for part in "qkv"]
                result[f"{match[1]}qkv.{match[3]}"] = torch.cat(parts)
        elif match := re.fullmatch(r"(head\.)attention\.in_proj_(weight|bias)", key):
            width = len(tensor) // 3
            result[f"{match[1]}q.{match[2]}"], result[f"{match[1]}kv.{match[2]}"] = tensor[:width], tensor[width:]
        else:
            result[key] = tensor
    return result
