"""Tiny towers to train heads on: a timm ViT and a BERT with random weights, and images in one colour."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from edje_index.bundles.random_tokenizer import untrained_tokenizer
from edje_index.captions.reading import CaptionedImage
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.recipes.contrastive.config import TowerSources

prepare_torchvision()

import timm  # noqa: E402

IMAGE_NAME = "test_vit"
IMAGE_SIZE = 64
COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (20, 40, 220), "white": (240, 240, 240)}


def tiny_sources(folder: Path) -> TowerSources:
    """Write the weights of both towers."""
    torch.manual_seed(0)
    trunk = timm.create_model(IMAGE_NAME, num_classes=0)
    save_file(trunk.state_dict(), folder / "image.safetensors")
    text = folder / "tiny-bert"
    text.mkdir()
    tokenizer = untrained_tokenizer(500)
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    tokenizer.save(text)
    (text / "config.json").write_text(json.dumps(config))
    joint = JointEncoder(bert_config(config), tokenizer, 8)
    save_file({k: v.clone() for k, v in joint.language_model.bert.state_dict().items()}, text / "model.safetensors")
    return TowerSources(IMAGE_NAME, folder / "image.safetensors", text, IMAGE_SIZE)


def coloured_items(folder: Path, count: int) -> list[CaptionedImage]:
    """Images with two captions each."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    items = []
    for number in range(count):
        colour = list(COLOURS)[number % len(COLOURS)]
        noise = rng.integers(-20, 20, (IMAGE_SIZE, IMAGE_SIZE, 3))
        path = folder / f"{number}.png"
        Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)).save(path)
        captions = (f"{colour} picture", f"a {colour} thing number {number}")
        items.append(CaptionedImage(path.name, str(path), captions, None, path.name))
    return items
