"""Builds an open_clip model from an image tower and a text tower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edje_index.errors import ModelError
from edje_index.filesystem import new_folder, write_json
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import HF_TEXT_FOLDER, WEIGHTS_FILE, ClipConfig
from edje_index.models.clip_model import build_clip
from edje_index.models.text_tower import save_text_tokenizer, text_tokenizer
from edje_index.models.weights import State, assign_weights, read_weights, save_weights
from edje_index.recipes.contrastive.config import TowerSources

prepare_torchvision()

import timm  # noqa: E402
from timm.models.vision_transformer import checkpoint_filter_fn  # noqa: E402

CONTEXT_LENGTH = 64  # tokens per text; longer texts are truncated
TEXT_WEIGHTS = "model.safetensors"
# Fields of config.json that determine a BERT's output; the others differ between versions of transformers.
_BERT_FIELDS = (
    "attention_probs_dropout_prob", "hidden_act", "hidden_dropout_prob", "hidden_size", "initializer_range",
    "intermediate_size", "layer_norm_eps", "max_position_embeddings", "model_type", "num_attention_heads",
    "num_hidden_layers", "pad_token_id", "type_vocab_size", "vocab_size",
)  # fmt: skip


@dataclass
class ContrastiveModel:
    """An open_clip model with a timm image tower and a Hugging Face text tower.

    Attributes:
        clip: the model, an ``open_clip.CustomTextCLIP``.
        config: configuration of the open_clip model.
        tokenizer: tokenizer of the text tower.
        text_config: fields of the text tower's ``config.json``.
    """

    clip: Any
    config: ClipConfig
    tokenizer: Any
    text_config: dict[str, Any]

    def save(self, out: Path) -> None:
        """Write the model to the new folder ``out``. ``load_clip("local-dir:OUT")`` loads the model.

        Raises:
            ModelError: ``out`` exists.
        """
        with new_folder(out) as folder:
            self.config.write(folder)
            save_weights(self.clip, folder / WEIGHTS_FILE)
            save_text_tokenizer(self.tokenizer, folder)
            (folder / HF_TEXT_FOLDER).mkdir()
            write_json(folder / HF_TEXT_FOLDER / "config.json", self.text_config)


def start_model(sources: TowerSources, embed_dim: int, seed: int) -> ContrastiveModel:
    """Build the initial model of a training run: towers with the given weights, and heads with random weights.

    Args:
        sources: the two towers.
        embed_dim: width of the shared embedding.
        seed: seed of the random weights.

    Raises:
        ModelError: a tower is missing or not supported.
    """
    text_config = _text_config(sources.text)
    config = clip_config(sources, embed_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip: Any = build_clip(config, sources.text)
    _load_image_weights(clip.visual.trunk, sources.image_weights)
    _load_text_weights(clip.text.transformer, sources.text / TEXT_WEIGHTS)
    return ContrastiveModel(clip, config, text_tokenizer(config, sources.text), text_config)


def clip_config(sources: TowerSources, embed_dim: int) -> ClipConfig:
    """Return the open_clip configuration of both towers. The preprocessing is the default of the timm model.

    Raises:
        ModelError: timm has no model named ``sources.image_name``.
    """
    vision = {
        "image_size": sources.image_size,
        "timm_model_name": sources.image_name,
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "mlp",
        "timm_proj_bias": True,
    }
    text = {
        "context_length": CONTEXT_LENGTH,
        "hf_model_name": sources.text.name,
        "hf_model_pretrained": False,
        "hf_tokenizer_name": sources.text.name,
        "hf_pooler_type": "mean_pooler",
        "hf_proj_type": "mlp",
    }
    pretrained: Any = timm.get_pretrained_cfg(sources.image_name)
    if pretrained is None:
        raise ModelError(
            f"timm {timm.__version__} has no model {sources.image_name!r}: give a name from timm.list_models()"
        )
    preprocess = {
        "size": [sources.image_size, sources.image_size],
        "mode": "RGB",
        "mean": list(pretrained.mean),
        "std": list(pretrained.std),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
        "fill_color": 0,
    }
    name = f"{sources.image_name}-{sources.text.name}"
    return ClipConfig(name, {"embed_dim": embed_dim, "vision_cfg": vision, "text_cfg": text}, preprocess)


def _text_config(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text())
        return {name: values[name] for name in _BERT_FIELDS if name in values}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{folder} does not hold a Hugging Face BERT model: {error}; give a directory with "
            "config.json, weights and tokenizer"
        ) from error


def _load_image_weights(trunk: Any, path: Path) -> None:
    state = {name: tensor.float() for name, tensor in _read(path).items() if not name.startswith("head.")}
    try:
        fitted = checkpoint_filter_fn(state, trunk)
    except (KeyError, RuntimeError) as error:
        raise ModelError(
            f"the weights {path} do not fit the tower {type(trunk).__name__}: {error}; give weights of this tower"
        ) from error
    assign_weights(trunk, fitted, str(path))


def _load_text_weights(transformer: torch.nn.Module, path: Path) -> None:
    """Load all weights except the weights of the pooler, which the model does not use."""
    state = {name.removeprefix("bert."): tensor.float() for name, tensor in _read(path).items()}
    unused = ("pooler.", "cls.", "embeddings.position_ids")
    used = {name: tensor for name, tensor in state.items() if not name.startswith(unused)}
    assign_weights(transformer, used, str(path))


def _read(path: Path) -> State:
    if not path.is_file():
        raise ModelError(f"there are no weights at {path}; download both towers with 'edje-index model fetch-towers'")
    return read_weights(path)
