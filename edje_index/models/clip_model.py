"""Image-text models of open_clip: their configuration, construction and weights.

Everything that asks open_clip for a model goes through here. ``model_config`` is open_clip's own
model configuration (``embed_dim``, ``vision_cfg``, ``text_cfg``, ...) and ``preprocess_config`` its
own preprocessing configuration, so that a stored pair is an open_clip ``local-dir:`` folder.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.filesystem import write_json
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.hub import hub_access
from edje_index.models.weights import assign_weights, read_weights

prepare_torchvision()

import open_clip  # noqa: E402
from open_clip.model import _build_vision_tower  # noqa: E402
from open_clip.timm_model import TimmModel  # noqa: E402
from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: E402

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
HF_TEXT_FOLDER = "hf_text"  # configuration of a Hugging Face text tower, beside the weights
LOCAL_DIR = "local-dir:"
SCHEMAS = ("hf-hub:", LOCAL_DIR)
# What a download that fails says, whichever library made it: a lookup, a connection, a hub's own error.
_OFFLINE_SIGNS = (
    "Failed to download", "Failed initial config", "couldn't connect", "Can't load", "Max retries", "offline",
    "urlopen error", "Name or service not known", "name resolution", "Connection", "LocalEntryNotFound",
)  # fmt: skip
_REFUSED_SIGNS = ("401", "403", "404")  # the hub answered


@dataclass(frozen=True)
class ClipConfig:
    """What decides an open_clip model but for its weights.

    Attributes:
        name: open_clip's name for it, for people.
        model: open_clip's ``model_cfg``.
        preprocess: open_clip's ``preprocess_cfg`` (size, mean, std, interpolation, resize mode).
    """

    name: str
    model: dict[str, Any]
    preprocess: dict[str, Any]

    @property
    def embed_dim(self) -> int:
        """Width of the pooled embedding."""
        return int(self.model["embed_dim"])

    @property
    def text(self) -> dict[str, Any]:
        """open_clip's ``text_cfg``."""
        text: dict[str, Any] = self.model["text_cfg"]
        return text

    @property
    def hf_text_name(self) -> str | None:
        """Name of the Hugging Face model that the text tower is, if it is one."""
        return self.text.get("hf_model_name")

    def write(self, folder: Path) -> None:
        """Write open_clip's ``open_clip_config.json``."""
        write_json(folder / CONFIG_FILE, {"model_cfg": self.model, "preprocess_cfg": self.preprocess})


def read_clip_config(folder: Path, name: str) -> ClipConfig:
    """Read ``open_clip_config.json`` of a folder.

    Raises:
        ModelError: absent, or not of that form.
    """
    try:
        content = json.loads((folder / CONFIG_FILE).read_text())
        return ClipConfig(name, dict(content["model_cfg"]), dict(content.get("preprocess_cfg") or {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} is not an open_clip configuration: {error!r}") from error


def build_clip(config: ClipConfig, hf_text: Path | None = None) -> torch.nn.Module:
    """The whole model (image and text tower) with random weights, on CPU, in evaluation mode.

    Args:
        config: what to build.
        hf_text: folder with the ``config.json`` of a Hugging Face text tower; else it comes from where the
            configuration says, which may be the hub.

    Raises:
        ModelError: open_clip refuses the configuration.
    """
    arguments = _offline_arguments(config)
    if hf_text is not None:
        arguments["text_cfg"]["hf_model_name"] = str(hf_text)
    custom_text = arguments.pop("custom_text", False) or config.hf_text_name
    cls = open_clip.CustomTextCLIP if custom_text else open_clip.CLIP
    if "multimodal_cfg" in arguments:
        cls = open_clip.CoCa
    model = _build(config.name, lambda: cls(**arguments))
    _resize_trunk(model.visual)
    return model


def build_visual(config: ClipConfig) -> torch.nn.Module:
    """The image tower alone (what ``build_clip`` holds as ``.visual``), never making the text tower.

    The text tower of a SigLIP2 has an embedding of 256,000 words: an encoder process need not hold it.
    """
    arguments = _offline_arguments(config)
    quick_gelu = bool(arguments.get("quick_gelu", False))
    visual = _build(
        config.name, lambda: _build_vision_tower(config.embed_dim, arguments["vision_cfg"], quick_gelu=quick_gelu)
    )
    _resize_trunk(visual)
    return visual


def load_clip(vision: str, pretrained: str | None) -> tuple[torch.nn.Module, ClipConfig]:
    """An open_clip model with its weights.

    Args:
        vision: a name open_clip knows (``ViT-B-16-SigLIP2``), optionally followed by ``:TAG`` or
            ``:WEIGHTS_FILE``; or ``hf-hub:ORG/REPO``; or ``local-dir:FOLDER``.
        pretrained: the same tag or weights file, apart. Without any, the model's only tag is taken.

    Raises:
        HubUnreachableError: the weights are not here and cannot be downloaded.
        ModelError: unknown name or tag, or weights that do not fit.
    """
    name, tag = _split_name(vision, pretrained)
    folder = Path(name.removeprefix(LOCAL_DIR))
    if name.startswith(LOCAL_DIR) and (folder / HF_TEXT_FOLDER).is_dir():
        return _load_folder(folder)
    if not name.startswith(SCHEMAS):
        tag = _resolve_tag(name, tag)
    try:
        with hub_access():
            model = open_clip.create_model(
                name, pretrained=tag, require_pretrained=True, force_preprocess_cfg=_preprocess_for_file(name, tag)
            )
            model_config = open_clip.get_model_config(name)
    except Exception as error:
        raise _load_error(vision, error) from error
    preprocess = dict(open_clip.get_model_preprocess_cfg(model))
    label = Path(name.removeprefix(LOCAL_DIR)).name if name.startswith(LOCAL_DIR) else name
    return model.eval(), ClipConfig(label, json.loads(json.dumps(model_config)), json.loads(json.dumps(preprocess)))


def _load_folder(folder: Path) -> tuple[torch.nn.Module, ClipConfig]:
    """A folder of this package with its Hugging Face text tower in it, which open_clip would look for elsewhere."""
    config = read_clip_config(folder, folder.name)
    model = build_clip(config, folder / HF_TEXT_FOLDER)
    assign_weights(model, read_weights(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE))
    return model, config


def eval_transform(config: ClipConfig) -> Any:
    """open_clip's own evaluation transform: PIL image to float32 [3, height, width]."""
    return image_transform_v2(PreprocessCfg(**config.preprocess), is_train=False)


def _split_name(vision: str, pretrained: str | None) -> tuple[str, str | None]:
    if vision.startswith(SCHEMAS):
        if pretrained:
            raise ModelError(f"{vision} brings its own weights: leave out {pretrained!r}")
        return vision, None
    name, _, tag = vision.partition(":")
    if tag and pretrained and tag != pretrained:
        raise ModelError(f"two sources of weights for {name}: {tag!r} and {pretrained!r}; give one")
    return name.replace("/", "-"), tag or pretrained


def _resolve_tag(name: str, tag: str | None) -> str:
    if open_clip.get_model_config(name) is None:
        raise ModelError(
            f"open_clip {open_clip.__version__} knows no model {name!r}; "
            "see open_clip.list_models(), or give hf-hub:ORG/REPO or local-dir:FOLDER"
        )
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag is None and len(tags) == 1:
        return str(tags[0])
    if tag is None:
        raise ModelError(f"say which weights of {name}: {name}:TAG with TAG of {_some(tags)}, or {name}:FILE")
    if tag not in tags and not Path(tag).is_file():
        raise ModelError(f"{name} has no weights {tag!r}: neither a file nor one of {_some(tags)}")
    return tag


def _preprocess_for_file(name: str, tag: str | None) -> dict[str, Any] | None:
    """Preprocessing for weights from a file: that of the model's first tag. A tag brings its own.

    open_clip would take OpenAI's for every file, which is wrong for SigLIP.
    """
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag is None or tag in tags or not tags:
        return None
    return {k: v for k, v in open_clip.get_pretrained_cfg(name, tags[0]).items() if k != "size"}


def _some(tags: list[str], limit: int = 8) -> str:
    return ", ".join(tags[:limit]) + (f" and {len(tags) - limit} more" if len(tags) > limit else "")


def _load_error(vision: str, error: Exception) -> ModelError:
    full = " ".join(str(error).split())
    text = full[:200]
    if any(sign in full for sign in _OFFLINE_SIGNS) and not any(sign in full for sign in _REFUSED_SIGNS):
        return HubUnreachableError(
            f"cannot download {vision}: the model hub is not reachable from here. Give a local file "
            "(NAME:/path/to/weights or local-dir:FOLDER), or fill the hub's cache (HF_HOME) on a machine that "
            f"reaches it and copy it here [{text}]"
        )
    return ModelError(f"cannot load {vision}: {text}")


def _offline_arguments(config: ClipConfig) -> dict[str, Any]:
    """The configuration with every "start from downloaded weights" switched off: weights come from files."""
    arguments = copy.deepcopy(config.model)
    arguments["vision_cfg"]["timm_model_pretrained"] = False
    if config.hf_text_name:
        arguments["text_cfg"]["hf_model_pretrained"] = False
    return arguments


def _resize_trunk(visual: Any) -> None:
    """Give a timm ViT the configured image size: open_clip builds it at its own, whatever ``image_size`` says."""
    if not isinstance(visual, TimmModel):
        return
    patches = getattr(visual.trunk, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is not None and tuple(size) != tuple(visual.image_size):
        visual.set_input_size(visual.image_size)


def _build(name: str, make: Any) -> torch.nn.Module:
    try:
        model: torch.nn.Module = make()
    except Exception as error:
        raise _load_error(name, error) from error
    return model.eval()
