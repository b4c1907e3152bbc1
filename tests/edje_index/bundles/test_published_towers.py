"""Towers inside published checkpoints, in the format of transformers, against
towers of open_clip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.import_models import (
    _TEXT_NAMES,
    _VISION_NAMES,
    OPEN_CLIP_NAMES,
    _open_clip_weights,
    import_checkpoint,
)
from edje_index.errors import ModelError
from edje_index.images.preprocessing import Preprocessor
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.clip_config import ClipConfig
from edje_index.models.weights import save_weights
from tests.edje_index.published_cases import Case, write_case
from tests.edje_index.towers import random_clip

prepare_torchvision()

import open_clip  # noqa: E402
from timm.models import register_model  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from transformers import (  # noqa: E402
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipVisionModel,
)

WIDTH = 32
LAYERS = 3
PATCHES = 16
WORDS = 90
# as open_clip describes SigLIP
TRUNK = {
    "image_size": 32,
    "timm_model_name": "small_siglip",
    "timm_model_pretrained": False,
    "timm_pool": "map",
    "timm_proj": "none",
}
TEXT = {
    "context_length": 16,
    "vocab_size": WORDS,
    "width": WIDTH,
    "heads": 2,
    "layers": 2,
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
    "act_kwargs": {"approximate": "tanh"},
}


@register_model
def small_siglip(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """The classes of timm's SigLIP at a small size."""
    assert not pretrained
    sizes = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": WIDTH,
        "depth": LAYERS,
        "num_heads": 2,
    }
    return VisionTransformer(
        **sizes, class_token=False, global_pool="map", num_classes=0
    )


def hugging_face(seed: int = 0) -> SiglipModel:
    """A small SigLIP of transformers with random weights."""
    shared = {
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "intermediate_size": 4 * WIDTH,
    }
    text = {
        "num_hidden_layers": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 16,
        "projection_size": WIDTH,
    }
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    vision = {
        "num_hidden_layers": LAYERS,
        "image_size": 32,
        "patch_size": 8,
        "hidden_act": "gelu",
    }
    torch.manual_seed(seed)
    config = SiglipConfig(
        text_config={**shared, **text, **special}, vision_config={**shared, **vision}
    )
    model = SiglipModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def write_tower(folder: Path, source: SiglipModel) -> str:
    """`source` as an open_clip folder. Its outputs are those of `source`, so its
    weights have the right names.
    """
    model = {
        "embed_dim": WIDTH,
        "vision_cfg": TRUNK,
        "text_cfg": TEXT,
        "custom_text": True,
    }
    config = ClipConfig(
        "small-siglip",
        model,
        {
            "size": [32, 32],
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "resize_mode": "squash",
        },
    )
    clip = random_clip(config)
    for target, tower, names in (
        (clip.visual.trunk, source.vision_model, _VISION_NAMES),
        (clip.text, source.text_model, _TEXT_NAMES),
    ):
        state = _open_clip_weights(dict(tower.state_dict()), names)
        target.load_state_dict(
            {
                key: state[key].reshape(value.shape)
                for key, value in target.state_dict().items()
            }
        )
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        ours = clip.visual.trunk.forward_features(pixels)
        theirs = source.vision_model(pixels)
        torch.testing.assert_close(ours, theirs.last_hidden_state, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            clip.encode_image(pixels), theirs.pooler_output, atol=1e-4, rtol=1e-4
        )
        ids = torch.randint(4, WORDS, (2, 16))
        expected = source.text_model(ids).pooler_output
        torch.testing.assert_close(
            clip.encode_text(ids), expected, atol=1e-4, rtol=1e-4
        )
    folder.mkdir()
    config.write(folder)
    save_weights(clip, folder / "open_clip_model.safetensors")
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def siglip() -> SiglipModel:
    return hugging_face()


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory, siglip: SiglipModel) -> str:
    return write_tower(tmp_path_factory.mktemp("open-clip") / "tower", siglip)


def checkpoint(
    folder: Path,
    siglip: SiglipModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """What the published trainer saves: towers included, in its default type, with
    the state of an optimiser.
    """
    case = Case(tokens=6, vision_dim=WIDTH, vision_heads=2, positions=90)
    state = {
        key: tensor
        for key, tensor in write_case(folder, case).items()
        if key.startswith(("l", "t", "class"))
    }
    state |= {
        k: v
        for k, v in torch.load(folder / "checkpoint.pth")["model"].items()
        if k.startswith("vision_proj")
    }
    vision = SiglipVisionModel(siglip.config.vision_config)
    vision.load_state_dict(
        {
            k: siglip.vision_model.state_dict()[k.removeprefix("vision_model.")]
            for k in vision.state_dict()
        }
    )
    state |= {
        f"vision_encoder.{key}": tensor for key, tensor in vision.state_dict().items()
    }
    state |= {f"clip.{key}": tensor for key, tensor in siglip.state_dict().items()}
    state = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in state.items()
    }
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=3e-4, weight_decay=0.05)
    parameter.sum().backward()
    optimizer.step()
    settings = {
        "batch_size": 32,
        "pretrain_files": ["a.json"],
        "finetune": False,
        "num_compressed_tokens": 6,
    }
    saved = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "config": {**settings, **config},
        "epoch": 4,
        "global_step": 12345,
    }
    torch.save(saved, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)
def test_what_the_trainer_saves_is_read(
    tmp_path: Path, tower: str, siglip: SiglipModel, dtype: torch.dtype
) -> None:
    path = checkpoint(
        tmp_path / "run",
        siglip,
        dtype=dtype,
        siglip_path="google/siglip2-base-patch8-32",
    )
    info = import_checkpoint(path, tower, tmp_path / "bundle")
    assert info.block_shape == (6, 16)
    bundle = ModelBundle.load(tmp_path / "bundle")
    image = Image.effect_noise((50, 41), 90).convert("RGB")
    processor = SiglipImageProcessor(
        size={"height": 32, "width": 32}, resample=Image.Resampling.BILINEAR
    )
    # as the published code resizes
    pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(
        Preprocessor(bundle.clip_config)(image)[None], pixels, atol=0.01, rtol=0
    )
    features, _ = bundle.vision.encode(pixels)
    with torch.inference_mode():
        expected = siglip.vision_model(pixels).last_hidden_state
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "tuned",
    [
        "vision_model.encoder.layers.1.self_attn.k_proj.weight",
        "vision_model.head.probe",
        "vision_model.embeddings.position_embedding.weight",
        "text_model.encoder.layers.1.mlp.fc2.bias",
    ],
)
def test_a_tuned_tower_is_refused(tmp_path: Path, tower: str, tuned: str) -> None:
    other = hugging_face()
    with torch.no_grad():
        other.get_parameter(tuned).view(-1)[5] += 0.02
    path = checkpoint(tmp_path / "run", other)
    with pytest.raises(ModelError, match="differs from local-dir"):
        import_checkpoint(path, tower, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_sizes_in_the_configuration_are_compared(
    tmp_path: Path, tower: str, siglip: SiglipModel
) -> None:
    path = checkpoint(
        tmp_path / "run", siglip, siglip_path="google/siglip2-large-patch16-384"
    )
    with pytest.raises(ModelError, match=r"576 patches, but local-dir:.* has 16"):
        import_checkpoint(path, tower, tmp_path / "bundle")


def test_the_recorded_tower_is_the_default(tmp_path: Path, siglip: SiglipModel) -> None:
    known = {
        name: open_clip.list_pretrained_tags_by_model(name)
        for name in open_clip.list_models()
    }
    for name in OPEN_CLIP_NAMES.values():
        model, _, tag = name.partition(":")
        assert tag in known[model]
    for config, message in (
        ({}, "names no tower"),
        ({"siglip_path": "mine"}, "names the unknown tower 'mine'"),
    ):
        path = checkpoint(tmp_path / message.replace(" ", ""), siglip, **config)
        with pytest.raises(ModelError, match=message):
            import_checkpoint(path, None, tmp_path / "bundle")
