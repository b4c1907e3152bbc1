"""Builds open_clip models with random weights, and loads pretrained ones from a
tag, a file, a folder or a hub.
"""

from __future__ import annotations

import copy
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from edje_index.errors import HubUnreachableError, ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import (
    HF_CONFIG_FILE,
    HF_TEXT_FOLDER,
    WEIGHTS_FILE,
    ClipConfig,
    read_clip_config,
)
from edje_index.models.safety import read_configuration
from edje_index.models.weights import load_module, one_line
from storage_formats.atomic import Json

prepare_torchvision()

import open_clip  # noqa: E402
from open_clip.hf_configs import arch_dict  # noqa: E402
from open_clip.model import _build_vision_tower  # noqa: E402
from open_clip.timm_model import TimmModel  # noqa: E402
from open_clip.transform import PreprocessCfg  # noqa: E402

LOCAL_DIR = "local-dir:"
_HUB = "hf-hub:"
_CONNECT_SECONDS = 5.0
_HUB_SETTINGS = threading.RLock()


def build_clip(config: ClipConfig, hf_text: Path | None = None) -> nn.Module:
    """Build the whole model with random weights, on the CPU, in evaluation mode.

    Args:
        hf_text: folder with the ``config.json`` of the text tower, if the text tower is
            a Hugging Face model.

    Raises:
        ModelError: ``config.json`` is missing, or open_clip does not support the model.
    """
    arguments = _without_downloads(config)
    if config.hf_text_name:
        if hf_text is None or not (hf_text / HF_CONFIG_FILE).is_file():
            raise ModelError(
                f"the text tower of {config.name} needs the file {HF_CONFIG_FILE},"
                f" which is not in {hf_text}: copy this file again"
            )
        hf_config = read_configuration(hf_text / HF_CONFIG_FILE)
        config.check_context_length(hf_config)
        model_type = hf_config.get("model_type")
        if model_type not in arch_dict:
            raise ModelError(
                f"{hf_text / HF_CONFIG_FILE} describes a text tower of type"
                f" {model_type!r}, which open_clip does not support: use one of the"
                f" types {', '.join(sorted(arch_dict))}"
            )
        arguments["text_cfg"]["hf_model_name"] = str(hf_text)
    custom_text = arguments.pop("custom_text", False) or config.hf_text_name
    model_class = open_clip.CustomTextCLIP if custom_text else open_clip.CLIP
    if "multimodal_cfg" in arguments:
        model_class = open_clip.CoCa
    model = _build(config.name, lambda: model_class(**arguments))
    _configure_trunk(model.visual, config)
    return model


def build_visual(config: ClipConfig) -> nn.Module:
    """Build only the image tower, with random weights."""
    arguments = _without_downloads(config)
    quick_gelu = bool(arguments.get("quick_gelu", False))
    visual = _build(
        config.name,
        lambda: _build_vision_tower(
            config.embed_dim, arguments["vision_cfg"], quick_gelu=quick_gelu
        ),
    )
    _configure_trunk(visual, config)
    return visual


def preprocess_settings(config: ClipConfig) -> PreprocessCfg:
    """Return the preprocessing settings of open_clip, with its defaults."""
    return PreprocessCfg(**config.preprocess)


def _without_downloads(config: ClipConfig) -> Json:
    """Return a copy of the configuration without pretrained weights, so that
    open_clip downloads nothing.
    """
    arguments = copy.deepcopy(config.model)
    arguments["vision_cfg"]["timm_model_pretrained"] = False
    if config.hf_text_name:
        arguments["text_cfg"]["hf_model_pretrained"] = False
    return arguments


def _build(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        with hub_access(local_only=True):
            return make().eval()
    except Exception as error:
        raise ModelError(
            f"cannot load {name}: {one_line(error)}; check the configuration of the"
            " model"
        ) from error


def _configure_trunk(visual: Any, config: ClipConfig) -> None:
    """Set the image size and the GELU of a timm ViT to those in `config`, because
    open_clip builds a timm ViT with timm's defaults.
    """
    if not isinstance(visual, TimmModel):
        return
    if options := config.model["vision_cfg"].get("act_kwargs"):
        for module in list(visual.trunk.modules()):
            for name, child in module.named_children():
                if type(child).__name__.startswith("GELU"):
                    setattr(module, name, nn.GELU(**options))
    patches = getattr(visual.trunk, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is not None and tuple(size) != tuple(visual.image_size):
        visual.set_input_size(visual.image_size)


def load_clip(vision: str) -> tuple[nn.Module, ClipConfig]:
    """Load an open_clip model. Return the model and its configuration.

    Args:
        vision: the model: ``NAME``, ``NAME:TAG``, ``NAME:WEIGHTS_FILE``,
            ``hf-hub:ORG/REPO`` or ``local-dir:FOLDER``. ``NAME`` is a model name of
            open_clip, such as ``ViT-B-16-SigLIP2``. A model with several sets of
            weights needs a ``TAG``, which selects one of them.

    Raises:
        HubUnreachableError: the weights are not in the local cache and cannot be
            downloaded.
        ModelError: the model or tag is unknown, or the weights do not fit the model.
    """
    tag: str | None = None
    preprocess: Json | None = None
    if vision.startswith(LOCAL_DIR):
        folder = Path(vision.removeprefix(LOCAL_DIR))
        # open_clip's own function for folders is not used, because it would request the
        # configuration of the text tower from the hub.
        config = read_clip_config(folder, folder.name)
        clip = load_module(
            folder / WEIGHTS_FILE, lambda: build_clip(config, folder / HF_TEXT_FOLDER)
        )
        # open_clip writes no size, and reads images in the size of the tower.
        visual: Any = clip.visual
        config.preprocess.setdefault("size", visual.image_size)
        return clip, config
    if vision.startswith(_HUB):
        name = vision
    else:
        name, _, tag = vision.partition(":")
        name = name.replace("/", "-")
        tags = open_clip.list_pretrained_tags_by_model(name)
        if not tag and len(tags) == 1:
            tag = str(tags[0])
        if tag not in tags and not Path(tag).is_file():
            raise ModelError(
                f"open_clip {open_clip.__version__} has no weights {vision!r}: give"
                f" {name}:FILE or {name}:TAG, where TAG is one of"
                f" {', '.join(tags) or 'none'}; or another model of"
                " open_clip.list_pretrained(), hf-hub:ORG/REPO or local-dir:FOLDER"
            )
        if tag not in tags and tags:
            # For a weights file, open_clip would use OpenAI's preprocessing, which is
            # wrong for SigLIP. The preprocessing of the first tag is used instead.
            pretrained = open_clip.get_pretrained_cfg(name, tags[0])
            preprocess = {
                key: value for key, value in pretrained.items() if key != "size"
            }
    reachable = True
    try:
        with hub_access() as reachable:
            model = open_clip.create_model(
                name,
                pretrained=tag,
                require_pretrained=True,
                force_preprocess_cfg=preprocess,
            )
            model_config = open_clip.get_model_config(name)
    except Exception as error:
        if reachable or (tag is not None and Path(tag).is_file()):
            raise ModelError(
                f"cannot load {vision}: {one_line(error)}; check the name and the files"
                " of the model"
            ) from error
        raise HubUnreachableError(
            f"cannot download {vision}: the model hub is not reachable from this"
            f" machine [{one_line(error)}]. Give local weights as"
            " NAME:/path/to/weights or local-dir:FOLDER. Alternatively, download the"
            " model on a machine that reaches the hub, and copy its cache directory"
            " HF_HOME to this machine"
        ) from error
    described = {
        "model": model_config,
        "preprocess": dict(open_clip.get_model_preprocess_cfg(model)),
    }
    # JSON converts tuples to lists, so that the configuration equals one that is read
    # from a file.
    described = json.loads(json.dumps(described))
    return model.eval(), ClipConfig(name, **described)


@contextmanager
def hub_access(*, local_only: bool = False) -> Iterator[bool]:
    """Context manager for calls that may download from the Hugging Face hub. Only one
    thread at a time runs such calls. The `with` statement yields True if the hub is
    reachable.

    If the hub is not reachable, its client retries for most of a minute. To avoid this
    wait, the context manager first tries to connect to the hub. If the connection
    fails, the client uses only the local cache. If a proxy is configured, no connection
    is tried, and the hub counts as reachable.

    Args:
        local_only: if True, nothing is downloaded, and the `with` statement yields
            False.
    """
    from huggingface_hub import constants

    # The offline mode of the client is a setting of the process, so only one thread at
    # a time may change it.
    with _HUB_SETTINGS, _without_log_records():
        offline = constants.HF_HUB_OFFLINE
        is_reachable = not (offline or local_only)
        if is_reachable and not {"https", "all"} & getproxies().keys():
            address = urlsplit(constants.ENDPOINT)
            try:
                socket.create_connection(
                    (address.hostname or "", address.port or 443),
                    timeout=_CONNECT_SECONDS,
                ).close()
            except OSError:
                is_reachable = False
        constants.HF_HUB_OFFLINE = not is_reachable
        try:
            yield is_reachable
        finally:
            constants.HF_HUB_OFFLINE = offline


@contextmanager
def _without_log_records() -> Iterator[None]:
    """Drop what the current thread logs to the root logger inside the `with` block."""
    thread = threading.get_ident()
    # open_clip calls `logging.info`, which adds a handler to a root logger without
    # handlers. `lastResort` prints what is printed without a handler.
    is_bare = not logging.root.handlers
    last_resort = logging.lastResort or logging.NullHandler()
    if is_bare:
        logging.root.addHandler(last_resort)

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    # open_clip logs to the root logger.
    logging.root.addFilter(is_of_others)
    try:
        yield
    finally:
        logging.root.removeFilter(is_of_others)
        if is_bare:
            logging.root.removeHandler(last_resort)
