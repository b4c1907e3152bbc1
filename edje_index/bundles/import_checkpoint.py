"""From a checkpoint of the published training code to a model bundle."""

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
    """Make a bundle of a published checkpoint and the open_clip tower that it was trained with.

    Args:
        checkpoint: the ``.pth`` file.
        vision: the tower: ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``, ``hf-hub:ORG/REPO`` or
            ``local-dir:FOLDER``, as open_clip names it.
        out: the bundle's folder, which must not exist.
        pretrained: tag or weights file of the tower, where ``vision`` does not say.
        tokenizer_dir: the joint encoder's tokenizer and ``config.json``; else ``tokenizer/`` beside the checkpoint.
        text_tokenizer_dir: files of the text tower's tokenizer, where it is a Hugging Face one that cannot be
            downloaded; a ``local-dir:`` folder holds its own.

    Raises:
        HubUnreachableError: weights or a tokenizer are not here and cannot be downloaded.
        ModelError: parts that are missing or do not fit each other.
    """
    path = Path(checkpoint)
    if Path(out).exists():
        raise ModelError(f"{out} exists already: give another folder, or remove it")
    tokenizer = _tokenizer_dir(path, tokenizer_dir)
    clip, config = load_clip(vision, pretrained)
    tower = vision_tower(clip.visual)  # type: ignore[arg-type]
    published = load_published_checkpoint(
        path, tokenizer, vision_heads=tower.num_heads, layer_norm_eps=tower.layer_norm_eps
    )
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
            f"no joint tokenizer at {folder}: a checkpoint does not hold it; give the folder with the language "
            "model's tokenizer and config.json (--tokenizer)"
        )
    return folder


def _text_tokenizer_dir(vision: str, given: str | Path | None) -> Path | None:
    if given is None and vision.startswith(LOCAL_DIR):
        return Path(vision.removeprefix(LOCAL_DIR))
    return Path(given) if given is not None else None


def _with_patch_count(adapter: Adapter, patches: int) -> Adapter:
    """A local adapter stores as many tokens as the tower has patches, which its checkpoint does not say."""
    if adapter.config.kind != LOCAL:
        return adapter
    sized = build_adapter(replace(adapter.config, num_tokens=patches))
    sized.load_state_dict(adapter.state_dict())
    return sized.requires_grad_(False)
