"""Reads and writes configurations of open_clip models, without open_clip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edje_index.errors import ModelError
from edje_index.models.filesystem import write_json
from edje_index.models.safety import read_configuration
from storage_formats.atomic import Json

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
HF_CONFIG_FILE = "config.json"
# folder beside the weights, with the configuration of a Hugging Face text tower
HF_TEXT_FOLDER = "hf_text"
# the default of open_clip, in tokens
_CONTEXT_LENGTH = 77
# largest context length of a text tower whose configuration names no limit
_POSITIONS = 512


@dataclass(frozen=True)
class ClipConfig:
    """Configuration of an open_clip model: everything except the weights.

    Attributes:
        name: name of the model in open_clip, for display only.
        preprocess: ``preprocess_cfg`` of open_clip: size, mean, standard deviation,
            interpolation and resize mode.
    """

    name: str
    model: Json
    preprocess: Json

    @property
    def embed_dim(self) -> int:
        """Width of the pooled embedding."""
        return int(self.model["embed_dim"])

    @property
    def text(self) -> Json:
        """The ``text_cfg`` of the model configuration."""
        text: Json = self.model["text_cfg"]
        return text

    @property
    def hf_text_name(self) -> str | None:
        """Hugging Face name of the text tower; None if open_clip implements the
        text tower.
        """
        return self.text.get("hf_model_name")

    @property
    def context_length(self) -> int:
        """Largest number of tokens per text."""
        return int(self.text.get("context_length", _CONTEXT_LENGTH))

    def check_context_length(self, hf_config: Json) -> None:
        """Raise ModelError if a Hugging Face text tower with the configuration
        `hf_config` has no positions for the `context_length`.
        """
        positions = hf_config.get("max_position_embeddings") or _POSITIONS
        if not isinstance(positions, int) or not 1 <= self.context_length <= positions:
            raise ModelError(
                f"the context_length of {self.name} is {self.context_length}, but its"
                f" text tower reads 1 to {positions} tokens: restore {CONFIG_FILE}"
            )

    def write(self, folder: Path) -> None:
        """Write the configuration to ``open_clip_config.json`` in `folder`."""
        write_json(
            folder / CONFIG_FILE,
            {"model_cfg": self.model, "preprocess_cfg": self.preprocess},
        )


def read_clip_config(folder: Path, name: str) -> ClipConfig:
    """Read ``open_clip_config.json`` from `folder`. `name` is the display name of the
    model.

    Raises:
        ModelError: the file is not a configuration of open_clip, or names a timm model
            that timm would download.
    """
    try:
        content = read_configuration(folder / CONFIG_FILE)
        config = ClipConfig(
            name, dict(content["model_cfg"]), dict(content.get("preprocess_cfg") or {})
        )
        tower = str(config.model["vision_cfg"].get("timm_model_name") or "")
        # raises TypeError if `tokenizer_kwargs` is not a mapping
        _ = {**(config.text.get("tokenizer_kwargs") or {})}
        # raises ValueError or TypeError if it is not a number
        _ = config.context_length
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / CONFIG_FILE} is not an open_clip configuration: {error!r};"
            " restore this file"
        ) from error
    if ":" in tower or "/" in tower:
        raise ModelError(
            f"{folder / CONFIG_FILE} names the timm model {tower!r}, which is not an"
            " architecture of timm: use a name from timm.list_models()"
        )
    return config
