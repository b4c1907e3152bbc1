"""Reads models of others: checkpoints of the published EDJE training code, and
open_clip models. Makes bundles of them.

A bundle of a published checkpoint has the adapter and the joint encoder of the
checkpoint. The frozen towers come from open_clip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.random_bundle import untrained_joint_encoder
from edje_index.errors import ModelError
from edje_index.models.adapter import (
    COMPRESSED,
    LOCAL,
    STRIDED,
    Adapter,
    AdapterConfig,
    build_adapter,
)
from edje_index.models.clip_model import load_clip, local_folder
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.models.weights import (
    State,
    assign_weights,
    check_finite,
    limited_by,
    read_checkpoint,
)
from edje_index.scoring.weights import DirectionWeights, ScoreWeights

ADAPTER_PREFIX = "vision_projection."
JOINT_PREFIXES = (
    "language_model.",
    "text_embeddings.",
    "classification_head.",
    "text_projection.",
)
WORDS = "language_model.bert.embeddings.word_embeddings.weight"
POSITIONS = "language_model.bert.embeddings.position_embeddings.weight"
SIGLIP2 = "google/siglip2-"
OPEN_CLIP_NAMES = {
    "google/siglip2-base-patch16-224": "ViT-B-16-SigLIP2:webli",
    "google/siglip2-base-patch16-384": "ViT-B-16-SigLIP2-384:webli",
    "google/siglip2-large-patch16-256": "ViT-L-16-SigLIP2-256:webli",
    "google/siglip2-large-patch16-384": "ViT-L-16-SigLIP2-384:webli",
}
"""open_clip's name of each tower that the published code supports, by the name on
the Hugging Face hub.
"""

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


@dataclass(frozen=True)
class PublishedModel:
    """The adapter and the joint encoder of a published checkpoint.

    Attributes:
        adapter: maps patch features [b, n, d_v] to tokens [b, m, d].
        joint: joint encoder. The published evaluation code converts captions to lower
            case without punctuation before it calls the model. To do the same, apply
            `edje_index.models.joint_inputs.clean_canonicalize` to captions.

    Examples:
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint(
        ...     "checkpoint.pth", "tokenizer", vision_heads=2
        ... )
        >>> model.joint.width
        16
    """

    adapter: Adapter
    joint: JointEncoder

    def score(
        self, captions: str | Sequence[str], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return matching logits, float32 [b].

        Args:
            captions: b captions, or one caption for all images.
            tokens: tokens from the adapter [b, m, d].
        """
        return self.joint.score(captions, tokens)


def load_published_checkpoint(
    checkpoint: str | Path,
    tokenizer_dir: str | Path,
    *,
    vision_heads: int,
    layer_norm_eps: float = 1e-6,
) -> PublishedModel:
    """Load the model from a checkpoint of the published training code. No code in the
    file runs.

    Args:
        checkpoint: checkpoint file (``.pth``).
        tokenizer_dir: directory with the tokenizer and the ``config.json`` of the joint
            encoder.
        vision_heads: number of attention heads of the vision tower. A compressed
            adapter has the same number.
        layer_norm_eps: epsilon of the layer norms of the vision tower. A compressed
            adapter has the same epsilon.

    Raises:
        ModelError: the file is not a checkpoint of the published training code, its
            parts do not fit each other, a weight is NaN or infinite, or the tokenizer
            cannot be read.

    Examples:
        >>> import torch
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint(
        ...     "checkpoint.pth", "tokenizer", vision_heads=2
        ... )
        >>> # 16 patches of a tower of width 32
        >>> tokens = model.adapter(torch.zeros(1, 16, 32))
        >>> tokens.shape, model.score("a red car", tokens).shape
        (torch.Size([1, 6, 16]), torch.Size([1]))
    """
    path = Path(checkpoint)
    state, _ = _read_checkpoint(path)
    return _published_model(
        path, state, Path(tokenizer_dir), vision_heads, layer_norm_eps
    )


def _read_checkpoint(path: Path) -> tuple[State, str | None]:
    """Return the weights of a checkpoint, and the Hugging Face name of its vision
    tower if the checkpoint names it.
    """
    content = read_checkpoint(path)
    state = content.get("model")
    config = content.get("config")
    if not isinstance(state, dict) or not all(
        isinstance(v, torch.Tensor) for v in state.values()
    ):
        raise ModelError(
            f"{path} is not a checkpoint of the published training code, because it has"
            " no 'model' weights; give another file"
        )
    tower = config.get("siglip_path") if isinstance(config, dict) else None
    return state, tower if isinstance(tower, str) else None


def _published_model(
    path: Path, state: State, tokenizer_dir: Path, heads: int, eps: float
) -> PublishedModel:
    """Build the adapter and the joint encoder from the weights `state` of the
    checkpoint `path`.
    """
    _require(path, state, WORDS, POSITIONS, "text_projection.weight")
    with limited_by(path):
        # Training adds the token <image> and may extend the position table. config.json
        # may still have the old sizes, so the sizes are taken from the weights.
        config = bert_config(
            tokenizer_dir / "config.json",
            vocab_size=state[WORDS].shape[0],
            max_position_embeddings=state[POSITIONS].shape[0],
        )
        joint = JointEncoder(
            config,
            load_joint_tokenizer(tokenizer_dir),
            state["text_projection.weight"].shape[0],
        )
        # Older versions of transformers stored the position ids 0, 1, 2, ... as well.
        kept = {
            k: v
            for k, v in state.items()
            if k.startswith(JOINT_PREFIXES) and not k.endswith(".position_ids")
        }
        assign_weights(joint, kept, f"the joint encoder of {path}")
        activation = str(joint.config.hidden_act)
        weights = {
            k.removeprefix(ADAPTER_PREFIX): v
            for k, v in state.items()
            if k.startswith(ADAPTER_PREFIX)
        }
        if "query" in weights:
            _require(path, weights, "mlp.fc1.weight", "projection.weight")
            adapter_config = AdapterConfig(
                kind=COMPRESSED,
                num_tokens=weights["query"].shape[1],
                vision_dim=weights["query"].shape[2],
                language_dim=weights["projection.weight"].shape[0],
                hidden_dim=weights["mlp.fc1.weight"].shape[0],
                num_heads=heads,
                activation=activation,
                layer_norm_eps=eps,
            )
        elif "0.weight" in weights:
            _require(path, weights, "2.weight")
            hidden, width = weights["0.weight"].shape
            # The checkpoint does not record the number of patches; import_checkpoint
            # sets it.
            adapter_config = AdapterConfig(
                LOCAL,
                1,
                width,
                weights["2.weight"].shape[0],
                hidden,
                activation=activation,
            )
        else:
            raise ModelError(
                f"{path} has no adapter: it lacks both {ADAPTER_PREFIX}query and"
                f" {ADAPTER_PREFIX}0.weight; give another checkpoint"
            )
        adapter = build_adapter(adapter_config)
        assign_weights(adapter, weights, f"the adapter of {path}")
    if adapter.config.language_dim != joint.width:
        raise ModelError(
            f"the adapter in {path} makes tokens of width"
            f" {adapter.config.language_dim}, but the joint encoder reads tokens of"
            f" width {joint.width}; give another checkpoint"
        )
    check_finite(joint.state_dict(), f"the joint encoder of {path}")
    check_finite(adapter.state_dict(), f"the adapter of {path}")
    return PublishedModel(adapter.requires_grad_(False), joint)


def _require(path: Path, weights: State, *names: str) -> None:
    if missing := [name for name in names if name not in weights]:
        raise ModelError(
            f"{path} is not a checkpoint of the published training code: it lacks the"
            f" weights {', '.join(missing)}; give another checkpoint"
        )


def import_checkpoint(
    checkpoint: str | Path,
    vision: str | None,
    out: str | Path,
    *,
    tokenizer_dir: str | Path | None = None,
    text_tokenizer_dir: str | Path | None = None,
) -> BundleInfo:
    """Make a bundle from a published checkpoint and the open_clip model that it was
    trained with.

    The final score of the bundle is the logit alone, as in the published code. If the
    checkpoint names a SigLIP2 tower, images are resized with a bilinear filter, as in
    the published code.

    Args:
        checkpoint: checkpoint file (``.pth``).
        vision: open_clip model: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``,
            ``hf-hub:ORG/REPO`` or ``local-dir:DIRECTORY``. None means the model named
            in the checkpoint.
        out: new directory for the bundle.
        tokenizer_dir: directory with the tokenizer and the ``config.json`` of the joint
            encoder. The default is the directory ``tokenizer/`` beside the checkpoint.
        text_tokenizer_dir: directory with the tokenizer of the text tower. This
            argument is needed only for a Hugging Face tokenizer that is not in a
            ``local-dir:`` model and cannot be downloaded.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be
            downloaded.
        ModelError: a file is missing, the parts do not fit each other, or the
            checkpoint contains other towers than ``vision``.

    Examples:
        >>> from edje_index import import_checkpoint
        >>> info = import_checkpoint(
        ...     "checkpoint.pth", "local-dir:model/vision", "imported"
        ... )
        >>> info.block_shape, info.trained
        ((6, 16), True)
    """
    path = Path(checkpoint)
    _check_new(out)
    tokenizer = Path(tokenizer_dir) if tokenizer_dir else path.parent / "tokenizer"
    if not tokenizer.is_dir():
        raise ModelError(
            f"the directory {tokenizer} with the tokenizer does not exist: give a"
            " directory with the tokenizer and the config.json of the joint encoder"
        )
    state, recorded = _read_checkpoint(path)
    if vision is None:
        if recorded not in OPEN_CLIP_NAMES:
            problem = (
                f"names the unknown tower {recorded!r}"
                if recorded
                else "names no tower"
            )
            raise ModelError(
                f"{path} {problem}: give the open_clip name of the model that the"
                " checkpoint was trained with"
            )
        vision = OPEN_CLIP_NAMES[recorded]
    clip, config = load_clip(vision)
    tower = vision_tower(clip.visual)  # type: ignore[arg-type]
    published = _published_model(
        path, state, tokenizer, tower.num_heads, tower.layer_norm_eps
    )
    adapter = published.adapter
    sizes = re.search(r"patch(\d{1,3})-(\d{1,4})$", recorded or "")
    if (
        sizes
        and (patches := (int(sizes[2]) // max(1, int(sizes[1]))) ** 2)
        != tower.num_patches
    ):
        raise ModelError(
            f"the checkpoint was trained with {recorded}, which has {patches} patches,"
            f" but {vision} has {tower.num_patches} patches: give the tower that the"
            " checkpoint was trained with"
        )
    check_same_towers(state, clip, vision)
    if (recorded or "").startswith(SIGLIP2):
        # transformers resizes the images of these towers with this filter, and
        # open_clip with another.
        config = replace(
            config, preprocess={**config.preprocess, "interpolation": "bilinear"}
        )
    # checkpoints lack the number of patches
    if adapter.config.kind == LOCAL:
        adapter.config = replace(adapter.config, num_tokens=tower.num_patches)
    published.joint.tokenizer.canonical = True
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(
            config, text_tokenizer_dir or local_folder(vision)
        ),
        adapter=adapter,
        joint=published.joint,
        trained=True,
        notes=f"imported from {path.name}, tower {vision}",
    )
    return bundle.save(out)


def bundle_of_open_clip(
    vision: str, out: str | Path, *, text_tokenizer_dir: str | Path | None = None
) -> BundleInfo:
    """Make a bundle from an open_clip model. The final score of the bundle is the
    embedding similarity alone.

    A bundle always has an adapter and a joint encoder. In this bundle, the adapter
    stores one patch per image, and searches do not use the joint encoder.

    Arguments and errors are as in `import_checkpoint`.
    """
    _check_new(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip, config = load_clip(vision)
        tower = vision_tower(clip.visual)  # type: ignore[arg-type]
        joint = untrained_joint_encoder(
            tower.embed_dim, words=8, width=8, intermediate=8, positions=80
        )
    by_embedding = ScoreWeights(logit=0.0, embedding=1.0)
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(
            config, text_tokenizer_dir or local_folder(vision)
        ),
        adapter=build_adapter(
            AdapterConfig(STRIDED, 1, tower.patch_dim, tower.patch_dim, hidden_dim=0)
        ),
        joint=joint,
        trained=True,
        notes=f"towers of {vision}; searches by embedding alone",
        score=DirectionWeights(by_embedding, by_embedding),
    )
    return bundle.save(out)


def _check_new(out: str | Path) -> None:
    if Path(out).exists():
        raise ModelError(
            f"{out} exists already: give another directory, or remove {out}"
        )


def check_same_towers(state: State, clip: torch.nn.Module, name: str) -> None:
    """Check that the towers in the weights of a checkpoint, if it has any, equal
    those of `clip` up to rounding.
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
            key.removeprefix(target): tensor
            for key, tensor in clip.state_dict().items()
            if key.startswith(target)
        }
        layers = {key for key in expected if "blocks." in key}
        for key in sorted(tower.keys() | layers):
            theirs = tower.get(key, torch.empty(0)).flatten()
            ours = expected.get(key, torch.empty(0)).flatten()
            if theirs.shape != ours.shape:
                raise ModelError(
                    f"{name} is not the tower of the checkpoint: {prefix}{target}{key}"
                    f" has {len(theirs)} values in the checkpoint and {len(ours)} in"
                    f" {name}; give the tower that the checkpoint was trained with"
                )
            tolerance = _ROUNDING.get(theirs.dtype, 1e-5)
            if not torch.allclose(
                theirs.float(), ours.float(), rtol=tolerance, atol=1e-6
            ):
                raise ModelError(
                    f"the tower {prefix}* in the checkpoint differs from {name} in the"
                    f" weights {target}{key}: give the open_clip model that the"
                    " checkpoint was trained with. If the tower was fine-tuned,"
                    " convert the tower to an open_clip model, and give this model as"
                    " local-dir:DIRECTORY"
                )


def _open_clip_weights(tower: State, renames: tuple[tuple[str, str], ...]) -> State:
    """Convert names of transformers to names of open_clip, which joins the weights
    of query, key and value.
    """
    result = {}
    for key, tensor in tower.items():
        parts = {key: tensor}
        if match := re.fullmatch(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)", key):
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
