"""Towers inside published checkpoints, and towers of transformers, against transformers
itself.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, SiglipVisionModel

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.import_models import (
    bundle_of_towers,
    import_checkpoint,
    siglip_config,
)
from edje_index.errors import ModelError
from edje_index.images.preprocessing import Preprocessor, normalize
from tests.edje_index.published_cases import Case, write_case
from tests.edje_index.siglip_cases import (
    HEADS,
    SIZE,
    WIDTH,
    siglip_model,
    write_siglip,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def siglip():
    return siglip_model()


@pytest.fixture(scope="module")
def tower(tmp_path_factory, siglip):
    """A downloaded repository of transformers."""
    folder = tmp_path_factory.mktemp("towers") / "siglip"
    write_siglip(folder, siglip)
    return str(folder)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_towers_of_transformers_give_its_outputs(tmp_path, activation):
    """From the photo to the embeddings, with the image processor's resize."""
    from transformers.models.siglip.image_processing_pil_siglip import (
        SiglipImageProcessorPil,
    )

    model = siglip_model(2, activation)
    write_siglip(tmp_path / "towers", model)
    bundle_of_towers(str(tmp_path / "towers"), tmp_path / "bundle")
    bundle = ModelBundle.load(tmp_path / "bundle")
    image = Image.effect_noise((50, 41), 90).convert("RGB")
    processor = SiglipImageProcessorPil.from_pretrained(tmp_path / "towers")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "towers")
    texts = ["a red dog", "car"]
    ids = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
    with torch.inference_mode():
        seen = model.vision_model(pixels)
        text = model.text_model(ids["input_ids"]).pooler_output
    preprocess = Preprocessor(bundle.clip_config)
    patches, embedding = bundle.vision.encode(
        normalize(preprocess(image)[None], preprocess.scale)
    )
    torch.testing.assert_close(
        patches, seen.last_hidden_state, atol=TOLERANCE, rtol=TOLERANCE
    )
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(
        embedding, unit(seen.pooler_output), atol=TOLERANCE, rtol=0
    )
    np.testing.assert_allclose(
        bundle.text.encode(texts), unit(text).numpy(), atol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "siglip2"}, "model_type is 'siglip2'"),
        (
            {"vision_config": {"hidden_act": "relu"}},
            "towers that this version does not",
        ),
        ({"vision_config": {"patch_size": 7}}, "timm has no SigLIP tower vit_"),
        ({"vision_config": {"image_size": "large"}}, "describes no SigLIP towers"),
    ],
)
def test_other_towers_are_refused(change, message):
    config = {"model_type": "siglip", "vision_config": {}, "text_config": {}, **change}
    with pytest.raises(ModelError, match=message):
        siglip_config(config, {}, "towers")


def checkpoint(folder, siglip, **config):
    """What the published trainer saves: towers included, in its default type, with
    the state of an optimiser.
    """
    case = Case(tokens=6, vision_dim=WIDTH, vision_heads=HEADS, positions=90)
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
        key: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for key, tensor in state.items()
    }
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    saved = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "config": {"finetune": False, "num_compressed_tokens": 6, **config},
        "epoch": 4,
    }
    torch.save(saved, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def test_what_the_trainer_saves_is_read(tmp_path, tower, siglip):
    path = checkpoint(
        tmp_path / "run", siglip, siglip_path="google/siglip2-base-patch8-32"
    )
    assert import_checkpoint(path, tower, tmp_path / "bundle").block_shape == (6, 16)
    bundle = ModelBundle.load(tmp_path / "bundle")
    pixels = torch.randn(1, 3, SIZE, SIZE)
    with torch.inference_mode():
        expected = siglip.bfloat16().float().vision_model(pixels).last_hidden_state
    features, _ = bundle.vision.encode(pixels)
    torch.testing.assert_close(features, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_two_different_vision_towers_are_refused(tmp_path, tower, siglip):
    path = checkpoint(tmp_path / "run", siglip)
    content = torch.load(path)
    content["model"]["vision_encoder.post_layernorm.bias"] += 1
    torch.save(content, path)
    with pytest.raises(ModelError, match=r"two vision towers, .* differ in post_layer"):
        import_checkpoint(path, tower, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_sizes_in_the_configuration_are_compared(tmp_path, tower, siglip):
    path = checkpoint(
        tmp_path / "run", siglip, siglip_path="google/siglip2-large-patch16-384"
    )
    with pytest.raises(ModelError, match=r"576 patches, but .* has 16"):
        import_checkpoint(path, tower, tmp_path / "bundle")
