"""Imports a checkpoint of the published training code as a model bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.published_checkpoint import load_published_checkpoint
from edje_index.errors import ModelError
from edje_index.models.adapter import LOCAL, Adapter, build_adapter
from edje_index.models.pretrained_clip import LOCAL_DIR, load_clip
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower


def import_checkpoint(
    checkpoint: str | Path,
    vision: str,
    out: str | Path,
    *,
    pretrained: str | None = None,
    tokenizer_dir: str | Path | None = None,
    text_tokenizer_dir: str | Path | None = None,
) -> BundleInfo:
    """Make a bundle from a published checkpoint and the open_clip model that it was trained with.

    The bundle scores by the joint encoder's logit alone and canonicalises captions, as published.

    Args:
        checkpoint: the ``.pth`` file.
        vision: the open_clip model: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``, ``hf-hub:ORG/REPO`` or
            ``local-dir:DIRECTORY``.
        out: the bundle's directory, which must not exist.
        pretrained: tag or weights file of the model, if ``vision`` does not name one.
        tokenizer_dir: the joint encoder's tokenizer and ``config.json``; by default ``tokenizer/`` beside the
            checkpoint.
        text_tokenizer_dir: files of the text tower's tokenizer, if it is a Hugging Face tokenizer that cannot be
            downloaded. A ``local-dir:`` directory holds its own.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be downloaded.
        ModelError: parts are missing or do not fit each other.

    Example:
        >>> from edje_index import import_checkpoint
        >>> info = import_checkpoint("checkpoint.pth", "local-dir:model/vision", "imported")
        >>> info.block_shape, info.trained
        ((6, 16), True)
    """
    path = Path(checkpoint)
    if Path(out).exists():
        raise ModelError(f"{out} exists already: choose another directory, or remove it")
    tokenizer = _tokenizer_dir(path, tokenizer_dir)
    clip, config = load_clip(vision, pretrained)
    tower = vision_tower(clip.visual)  # type: ignore[arg-type]
    published = load_published_checkpoint(
        path, tokenizer, vision_heads=tower.num_heads, layer_norm_eps=tower.layer_norm_eps
    )
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


def _tokenizer_dir(checkpoint: Path, given: str | Path | None) -> Path:
    folder = Path(given) if given else checkpoint.parent / "tokenizer"
    if not folder.is_dir():
        raise ModelError(
            f"no joint tokenizer at {folder}: a checkpoint does not contain it; name the directory with the language "
            "model's tokenizer and config.json"
        )
    return folder


def _text_tokenizer_dir(vision: str, given: str | Path | None) -> Path | None:
    if given is None and vision.startswith(LOCAL_DIR):
        return Path(vision.removeprefix(LOCAL_DIR))
    return Path(given) if given is not None else None


def _with_patch_count(adapter: Adapter, patches: int) -> Adapter:
    """Give a local adapter as many tokens as the tower has patches, which its checkpoint does not record."""
    if adapter.config.kind != LOCAL:
        return adapter
    sized = build_adapter(replace(adapter.config, num_tokens=patches))
    sized.load_state_dict(adapter.state_dict())
    return sized.requires_grad_(False)
