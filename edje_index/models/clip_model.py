"""Builds open_clip models with random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import HF_CONFIG_FILE, ClipConfig
from edje_index.models.hub import hub_access, loading_error
from edje_index.models.safety import read_configuration

prepare_torchvision()

import open_clip  # noqa: E402
from open_clip.hf_configs import arch_dict  # noqa: E402
from open_clip.model import _build_vision_tower  # noqa: E402
from open_clip.timm_model import TimmModel  # noqa: E402
from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: E402


def build_clip(config: ClipConfig, hf_text: Path | None = None) -> torch.nn.Module:
    """Build the whole model with random weights, on the CPU, in evaluation mode.

    Args:
        config: configuration of the model.
        hf_text: folder with the ``config.json`` of the text tower, if the text tower is a Hugging Face model.

    Raises:
        ModelError: open_clip does not accept the configuration, ``config.json`` is missing, or open_clip does not
            support the text tower.
    """
    arguments = _without_downloads(config)
    if config.hf_text_name:
        _check_hf_text(config.name, hf_text)
        arguments["text_cfg"]["hf_model_name"] = str(hf_text)
    custom_text = arguments.pop("custom_text", False) or config.hf_text_name
    model_class = open_clip.CustomTextCLIP if custom_text else open_clip.CLIP
    if "multimodal_cfg" in arguments:
        model_class = open_clip.CoCa
    model = _build(config.name, lambda: model_class(**arguments))
    _resize_trunk(model.visual)
    return model


def build_visual(config: ClipConfig) -> torch.nn.Module:
    """Build only the image tower, with random weights."""
    arguments = _without_downloads(config)
    quick_gelu = bool(arguments.get("quick_gelu", False))
    visual = _build(
        config.name, lambda: _build_vision_tower(config.embed_dim, arguments["vision_cfg"], quick_gelu=quick_gelu)
    )
    _resize_trunk(visual)
    return visual


def eval_transform(config: ClipConfig) -> Any:
    """Return the evaluation transform of open_clip. It maps a PIL image to pixels, float32 [3, height, width]."""
    return image_transform_v2(PreprocessCfg(**config.preprocess), is_train=False)


def _without_downloads(config: ClipConfig) -> dict[str, Any]:
    """Return a copy of the configuration without pretrained weights, so that open_clip downloads nothing."""
    arguments = copy.deepcopy(config.model)
    arguments["vision_cfg"]["timm_model_pretrained"] = False
    if config.hf_text_name:
        arguments["text_cfg"]["hf_model_pretrained"] = False
    return arguments


def _resize_trunk(visual: Any) -> None:
    """Resize a timm ViT to the image size in the configuration, because open_clip uses timm's default size."""
    if not isinstance(visual, TimmModel):
        return
    patches = getattr(visual.trunk, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is not None and tuple(size) != tuple(visual.image_size):
        visual.set_input_size(visual.image_size)


def _check_hf_text(name: str, folder: Path | None) -> None:
    """Raise ModelError unless open_clip supports the Hugging Face text tower in `folder`."""
    if folder is None or not (folder / HF_CONFIG_FILE).is_file():
        raise ModelError(
            f"the text tower of {name} needs the file {HF_CONFIG_FILE}, which is not in {folder}: copy this file again"
        )
    model_type = read_configuration(folder / HF_CONFIG_FILE).get("model_type")
    if model_type not in arch_dict:
        raise ModelError(
            f"{folder / HF_CONFIG_FILE} describes a text tower of type {model_type!r}, which open_clip "
            f"does not support: use one of the types {', '.join(sorted(arch_dict))}"
        )


def _build(name: str, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    try:
        with hub_access(local_only=True):
            return make().eval()
    except Exception as error:
        raise loading_error(name, error) from error
