"""Makes bundles from models of others: checkpoints of the published EDJE training code, and open_clip models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.published_checkpoint import PublishedCheckpoint
from edje_index.bundles.random_bundle import untrained_joint_encoder
from edje_index.errors import ModelError
from edje_index.models.adapter import LOCAL, STRIDED, AdapterConfig, build_adapter
from edje_index.models.clip_model import LOCAL_DIR, load_clip
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.models.weights import State
from edje_index.scoring.weights import DirectionWeights, ScoreWeights

OPEN_CLIP_NAMES = {
    "google/siglip2-base-patch16-224": "ViT-B-16-SigLIP2:webli",
    "google/siglip2-base-patch16-384": "ViT-B-16-SigLIP2-384:webli",
    "google/siglip2-large-patch16-256": "ViT-L-16-SigLIP2-256:webli",
    "google/siglip2-large-patch16-384": "ViT-L-16-SigLIP2-384:webli",
}
"""open_clip's name of each tower that the published code supports, by the name on the Hugging Face hub."""

_ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Patterns in the names of transformers' SigLIP towers, and open_clip's names.
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


def import_checkpoint(
    checkpoint: str | Path,
    vision: str | None,
    out: str | Path,
    *,
    tokenizer_dir: str | Path | None = None,
    text_tokenizer_dir: str | Path | None = None,
) -> BundleInfo:
    """Make a bundle from a published checkpoint and the open_clip model that it was trained with.

    The final score of the bundle is the logit alone, as in the published code.

    Args:
        checkpoint: checkpoint file (``.pth``).
        vision: open_clip model: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``, ``hf-hub:ORG/REPO`` or
            ``local-dir:DIRECTORY``. None means the model named in the checkpoint.
        out: new directory for the bundle.
        tokenizer_dir: directory with the tokenizer and the ``config.json`` of the joint encoder. The default is the
            directory ``tokenizer/`` beside the checkpoint.
        text_tokenizer_dir: directory with the tokenizer of the text tower. This argument is needed only for a Hugging
            Face tokenizer that is not in a ``local-dir:`` model and cannot be downloaded.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be downloaded.
        ModelError: a file is missing, the parts do not fit each other, or the checkpoint contains other towers than
            ``vision``.

    Example:
        >>> from edje_index import import_checkpoint
        >>> info = import_checkpoint("checkpoint.pth", "local-dir:model/vision", "imported")
        >>> info.block_shape, info.trained
        ((6, 16), True)
    """
    path = Path(checkpoint)
    _check_new(out)
    tokenizer = Path(tokenizer_dir) if tokenizer_dir else path.parent / "tokenizer"
    if not tokenizer.is_dir():
        raise ModelError(
            f"the directory {tokenizer} with the tokenizer does not exist: give a directory with the tokenizer and the "
            "config.json of the joint encoder"
        )
    content = PublishedCheckpoint.read(path)
    if vision is None:
        recorded = content.siglip_path
        if recorded not in OPEN_CLIP_NAMES:
            problem = f"names the unknown tower {recorded!r}" if recorded else "names no tower"
            raise ModelError(
                f"{path} {problem}: give the open_clip name of the model that the checkpoint was trained with"
            )
        vision = OPEN_CLIP_NAMES[recorded]
    clip, config = load_clip(vision)
    tower = vision_tower(clip.visual)  # type: ignore[arg-type]
    published = content.model(tokenizer, vision_heads=tower.num_heads, layer_norm_eps=tower.layer_norm_eps)
    adapter = published.adapter
    sizes = re.search(r"patch(\d{1,3})-(\d{1,4})$", content.siglip_path or "")
    if sizes and (patches := (int(sizes[2]) // max(1, int(sizes[1]))) ** 2) != tower.num_patches:
        raise ModelError(
            f"the checkpoint was trained with {content.siglip_path}, which has {patches} patches, but {vision} has "
            f"{tower.num_patches} patches: give the tower that the checkpoint was trained with"
        )
    check_same_towers(content.weights, clip, vision)
    if adapter.config.kind == LOCAL:  # checkpoints lack the number of patches
        weights = adapter.state_dict()
        adapter = build_adapter(replace(adapter.config, num_tokens=tower.num_patches)).requires_grad_(False)
        adapter.load_state_dict(weights)
    published.joint.tokenizer.canonical = True
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, _text_tokenizer_dir(vision, text_tokenizer_dir)),
        adapter=adapter,
        joint=published.joint,
        trained=True,
        notes=f"imported from {path.name}, tower {vision}",
    )
    return bundle.save(out)


def bundle_of_open_clip(vision: str, out: str | Path, *, text_tokenizer_dir: str | Path | None = None) -> BundleInfo:
    """Make a bundle from an open_clip model. The final score of the bundle is the embedding similarity alone.

    A bundle always has an adapter and a joint encoder. In this bundle, the adapter stores one patch per image, and
    searches do not use the joint encoder.

    Args:
        vision: open_clip model: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``, ``hf-hub:ORG/REPO`` or
            ``local-dir:DIRECTORY``.
        out: new directory for the bundle.
        text_tokenizer_dir: as in `import_checkpoint`.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be downloaded.
        ModelError: the model is unknown, the weights do not fit the model, or `out` exists.
    """
    _check_new(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip, config = load_clip(vision)
        tower = vision_tower(clip.visual)  # type: ignore[arg-type]
        joint = untrained_joint_encoder(tower.embed_dim, words=8, width=8, intermediate=8, positions=80)
    by_embedding = ScoreWeights(logit=0.0, embedding=1.0)
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, _text_tokenizer_dir(vision, text_tokenizer_dir)),
        adapter=build_adapter(AdapterConfig(STRIDED, 1, tower.patch_dim, tower.patch_dim, hidden_dim=0)),
        joint=joint,
        trained=True,
        notes=f"towers of {vision}; searches by embedding alone",
        score=DirectionWeights(by_embedding, by_embedding),
    )
    return bundle.save(out)


def _check_new(out: str | Path) -> None:
    if Path(out).exists():
        raise ModelError(f"{out} exists already: give another directory, or remove {out}")


def _text_tokenizer_dir(vision: str, given: str | Path | None) -> Path | None:
    if given is None and vision.startswith(LOCAL_DIR):
        return Path(vision.removeprefix(LOCAL_DIR))
    return Path(given) if given is not None else None


def check_same_towers(state: State, clip: torch.nn.Module, name: str) -> None:
    """Check that the towers of a checkpoint equal the towers of `clip`, up to rounding.

    A checkpoint without towers is accepted.

    Args:
        state: weights of the checkpoint by name.
        clip: open_clip model.
        name: name of the open_clip model, for error messages.

    Raises:
        ModelError: a tower of the checkpoint has another size or other weights than the same tower of `clip`.
    """
    for prefix, target, renames in (
        ("vision_encoder.", "visual.trunk.", _VISION_NAMES),
        ("clip.vision_model.", "visual.trunk.", _VISION_NAMES),
        ("clip.text_model.", "text.", _TEXT_NAMES),
    ):
        weights = {
            key.removeprefix(prefix).removeprefix("vision_model."): tensor
            for key, tensor in state.items()
            if key.startswith(prefix)
        }
        if not any(key.startswith("encoder.layers.") for key in weights):
            continue
        tower = _open_clip_weights(weights, renames)
        expected = {
            key.removeprefix(target): tensor for key, tensor in clip.state_dict().items() if key.startswith(target)
        }
        layers = {key for key in expected if "blocks." in key}
        for key in sorted(tower.keys() | layers):
            what = f"{prefix}{target}{key}"
            sizes = [tensors[key].numel() if key in tensors else 0 for tensors in (tower, expected)]
            if sizes[0] != sizes[1]:
                raise ModelError(
                    f"{name} is not the tower of the checkpoint: {what} has {sizes[0]} values in the checkpoint and "
                    f"{sizes[1]} in {name}; give the tower that the checkpoint was trained with"
                )
            tolerance = _ROUNDING.get(tower[key].dtype, 1e-5)
            ours = expected[key].float().flatten()
            if not torch.allclose(tower[key].float().flatten(), ours, rtol=tolerance, atol=1e-6):
                raise ModelError(
                    f"the tower {prefix}* in the checkpoint differs from {name} in the weights {target}{key}: give the "
                    "open_clip model that the checkpoint was trained with. If the tower was fine-tuned, convert the "
                    "tower to an open_clip model, and give this model as local-dir:DIRECTORY"
                )


def _open_clip_weights(tower: State, renames: tuple[tuple[str, str], ...]) -> State:
    """Convert names of transformers to names of open_clip, which joins the weights of query, key and value."""
    result = {}
    for key, tensor in tower.items():
        parts = {key: tensor}
        if match := re.fullmatch(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)", key):
            if match[2] != "q":
                continue
            joined = [tower.get(f"{match[1]}{part}_proj.{match[3]}", tensor) for part in "qkv"]
            parts = {f"{match[1]}qkv.{match[3]}": torch.cat(joined)}
        elif match := re.fullmatch(r"(head\.)attention\.in_proj_(weight|bias)", key):
            width = len(tensor) // 3
            parts = {f"{match[1]}q.{match[2]}": tensor[:width], f"{match[1]}kv.{match[2]}": tensor[width:]}
        for name, value in parts.items():
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            result[name] = value
    return result
