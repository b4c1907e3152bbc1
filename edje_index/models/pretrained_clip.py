"""Loads open_clip models with weights from a pretrained tag, a file, a folder or a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import HF_TEXT_FOLDER, WEIGHTS_FILE, ClipConfig, read_clip_config
from edje_index.models.clip_model import build_clip
from edje_index.models.hub import hub_access, loading_error
from edje_index.models.weights import assign_weights, read_weights

prepare_torchvision()

import open_clip  # noqa: E402

LOCAL_DIR = "local-dir:"
SCHEMAS = ("hf-hub:", LOCAL_DIR)
_MAX_LISTED_TAGS = 8


def load_clip(vision: str, *, untrained: bool = False) -> tuple[torch.nn.Module, ClipConfig]:
    """Load an open_clip model. Return the model and its configuration.

    Args:
        vision: the model: ``NAME``, ``NAME:TAG``, ``NAME:WEIGHTS_FILE``, ``hf-hub:ORG/REPO`` or ``local-dir:FOLDER``.
            ``NAME`` is a model name of open_clip, such as ``ViT-B-16-SigLIP2``. Without a tag, it must have only one.
        untrained: draw random weights instead of loading weights; `vision` must then be a ``NAME``.

    Raises:
        HubUnreachableError: the weights are not in the local cache and cannot be downloaded.
        ModelError: the model or tag is unknown, or the weights do not fit the model.
    """
    name, tag = _split_name(vision)
    folder = Path(name.removeprefix(LOCAL_DIR))
    if name.startswith(LOCAL_DIR) and (folder / HF_TEXT_FOLDER).is_dir():
        return _load_folder(folder)
    if untrained:
        _check_untrained(name, tag)
    elif not name.startswith(SCHEMAS):
        tag = _resolve_tag(name, tag)
    try:
        with hub_access():
            model = open_clip.create_model(
                name,
                pretrained=tag,
                require_pretrained=not untrained,
                force_preprocess_cfg=_preprocess_for_file(name, "" if untrained else tag),
            )
            model_config = open_clip.get_model_config(name)
    except Exception as error:
        raise loading_error(vision, error) from error
    preprocess = dict(open_clip.get_model_preprocess_cfg(model))
    label = folder.name if name.startswith(LOCAL_DIR) else name
    return model.eval(), ClipConfig(label, _plain_json(model_config), _plain_json(preprocess))


def _load_folder(folder: Path) -> tuple[torch.nn.Module, ClipConfig]:
    """Load a model from a folder that contains the configuration of a Hugging Face text tower."""
    # open_clip cannot load such a folder offline, because it requests that configuration from the hub.
    config = read_clip_config(folder, folder.name)
    model = build_clip(config, folder / HF_TEXT_FOLDER)
    assign_weights(model, read_weights(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE))
    return model, config


def _split_name(vision: str) -> tuple[str, str | None]:
    """Return the model name, and the tag or weights file. Return None instead of a tag if no argument names one."""
    if vision.startswith(SCHEMAS):
        return vision, None
    name, _, tag = vision.partition(":")
    return name.replace("/", "-"), tag or None


def _check_untrained(name: str, tag: str | None) -> None:
    if tag is not None or name.startswith(SCHEMAS):
        raise ModelError(f"random weights need a model name of open_clip alone, not {name}{(f':{tag}' if tag else '')}")
    _check_name(name)


def _check_name(name: str) -> None:
    if open_clip.get_model_config(name) is None:
        raise ModelError(
            f"open_clip {open_clip.__version__} knows no model {name!r}: give a name from "
            "open_clip.list_models(), hf-hub:ORG/REPO or local-dir:FOLDER"
        )


def _resolve_tag(name: str, tag: str | None) -> str:
    _check_name(name)
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag is None and len(tags) == 1:
        return str(tags[0])
    if tag is None:
        raise ModelError(
            f"{name} has several sets of weights: give {name}:TAG or {name}:FILE, where TAG is one of {_listed(tags)}"
        )
    if tag not in tags and not Path(tag).is_file():
        raise ModelError(f"{name} has no weights {tag!r}: give a weights file, or one of the tags {_listed(tags)}")
    return tag


def _preprocess_for_file(name: str, tag: str | None) -> dict[str, Any] | None:
    """Return the preprocessing for weights from a file. Return None if `tag` is not a file."""
    # For every file open_clip would use OpenAI's preprocessing, which is wrong for SigLIP.
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag is None or tag in tags or not tags:
        return None
    return {key: value for key, value in open_clip.get_pretrained_cfg(name, tags[0]).items() if key != "size"}


def _listed(tags: list[str]) -> str:
    more = f" and {len(tags) - _MAX_LISTED_TAGS} more" if len(tags) > _MAX_LISTED_TAGS else ""
    return ", ".join(tags[:_MAX_LISTED_TAGS]) + more


def _plain_json(value: Any) -> Any:
    """Convert `value` to JSON and back. Tuples become lists."""
    return json.loads(json.dumps(value))
