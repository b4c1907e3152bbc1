"""Makes a bundle from a checkpoint of the published training code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.published_checkpoint import PublishedCheckpoint
from edje_index.bundles.published_towers import OPEN_CLIP_NAMES, check_same_towers, check_tower_size
from edje_index.errors import ModelError
from edje_index.models.adapter import LOCAL, Adapter, build_adapter
from edje_index.models.pretrained_clip import LOCAL_DIR, load_clip
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import VisionTower, vision_tower


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
    if Path(out).exists():
        raise ModelError(f"{out} exists already: give another directory, or remove {out}")
    tokenizer = _tokenizer_dir(path, tokenizer_dir)
    content = PublishedCheckpoint.read(path)
    vision = vision or _recorded_tower(content)
    clip, config = load_clip(vision)
    tower = vision_tower(clip.visual)  # type: ignore[arg-type]
    published = content.model(tokenizer, vision_heads=tower.num_heads, layer_norm_eps=tower.layer_norm_eps)
    _check_towers(content, published.adapter, tower, clip, vision)
    published.joint.tokenizer.canonical = True
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, _text_tokenizer_dir(vision, text_tokenizer_dir)),
        adapter=_with_patch_count(published.adapter, tower.num_patches),
        joint=published.joint,
        trained=True,
        notes=f"imported from {path.name}, tower {vision}",
    )
    return bundle.save(out)


def _recorded_tower(checkpoint: PublishedCheckpoint) -> str:
    if checkpoint.siglip_path not in OPEN_CLIP_NAMES:
        recorded = f"names the unknown tower {checkpoint.siglip_path!r}" if checkpoint.siglip_path else "names no tower"
        raise ModelError(
            f"{checkpoint.path} {recorded}: give the open_clip name of the model that the checkpoint was trained with"
        )
    return OPEN_CLIP_NAMES[checkpoint.siglip_path]


def _check_towers(
    checkpoint: PublishedCheckpoint, adapter: Adapter, tower: VisionTower, clip: torch.nn.Module, name: str
) -> None:
    is_local = adapter.config.kind == LOCAL
    check_tower_size(tower, name, checkpoint.siglip_path, checkpoint.positions, local=is_local)
    check_same_towers(checkpoint.weights, clip, name)


def _tokenizer_dir(checkpoint: Path, given: str | Path | None) -> Path:
    folder = Path(given) if given else checkpoint.parent / "tokenizer"
    if not folder.is_dir():
        raise ModelError(
            f"the directory {folder} with the tokenizer does not exist: give a directory with the tokenizer and the "
            "config.json of the joint encoder"
        )
    return folder


def _text_tokenizer_dir(vision: str, given: str | Path | None) -> Path | None:
    if given is None and vision.startswith(LOCAL_DIR):
        return Path(vision.removeprefix(LOCAL_DIR))
    return Path(given) if given is not None else None


def _with_patch_count(adapter: Adapter, patches: int) -> Adapter:
    """Set the number of patches of a local adapter, which checkpoints lack. Return any other adapter unchanged."""
    if adapter.config.kind != LOCAL:
        return adapter
    sized = build_adapter(replace(adapter.config, num_tokens=patches))
    sized.load_state_dict(adapter.state_dict())
    return sized.requires_grad_(False)
