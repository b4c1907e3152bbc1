"""The steps that make the shipped model, on tiny towers with random weights."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import save_file
from torch import nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import (
    ADAPTER_WEIGHTS,
    JOINT_WEIGHTS,
    VISION_WEIGHTS,
    read_bundle_info,
)
from edje_index.bundles.random_bundle import untrained_tokenizer
from edje_index.bundles.shipped_model import (
    BUNDLE_FOLDER,
    IMAGE_TOWER,
    TENSORS_FILE,
    TEXT_TOWER,
    unpack_model,
)
from edje_index.captions.reading import CaptionedImage
from edje_index.errors import ModelError
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.clip_model import load_clip
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.text_tower import TextTower, text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.scoring.weights import DirectionWeights, ScoreWeights
from edje_index.training.start import load_language_model
from models.embedding import (
    TOWER_WEIGHTS,
    pair_features,
    start_model,
    timm,
    train_heads,
)
from models.make import pack_model
from tests.storage_formats.reading_cases import flip

COLOURS = {
    "red": (200, 30, 30),
    "green": (30, 180, 40),
    "blue": (20, 40, 220),
    "white": (240, 240, 240),
}


def tiny_model(towers):
    return start_model(towers, embed_dim=12, image_name="test_vit", image_size=64)


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """A folder like that of the base towers."""
    folder = tmp_path_factory.mktemp("towers")
    image = folder / IMAGE_TOWER
    text = folder / TEXT_TOWER
    image.mkdir()
    text.mkdir()
    torch.manual_seed(0)
    save_file(
        timm.create_model("test_vit", num_classes=0).state_dict(), image / TOWER_WEIGHTS
    )
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
    bert = JointEncoder(bert_config(config), tokenizer, 8).language_model.bert
    save_file(
        {name: tensor.clone() for name, tensor in bert.state_dict().items()},
        text / TOWER_WEIGHTS,
    )
    return folder


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """Images in one colour each, with two captions."""
    folder = tmp_path_factory.mktemp("coloured")
    rng = np.random.default_rng(0)
    found = []
    for number in range(16):
        colour = list(COLOURS)[number % len(COLOURS)]
        path = folder / f"{number}.png"
        pixels = np.array(COLOURS[colour]) + rng.integers(-20, 20, (64, 64, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
        captions = (f"{colour} picture", f"a {colour} thing number {number}")
        found.append(CaptionedImage(str(path), captions, None))
    return found


def test_the_trained_model_is_the_one_that_open_clip_and_the_bundle_use(
    towers, items, tmp_path
):
    model = tiny_model(towers)
    start = tiny_model(towers).clip.state_dict()
    data = pair_features(model, items)
    recalls = train_heads(
        model.clip, data, data, epochs=30, batch_size=16, lr=3e-2, dropout=0
    )
    model.save(tmp_path / "model")
    trained = model.clip.state_dict()
    heads = ("visual.head.", "text.proj.")
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert {name for name in start if name.startswith(heads)} <= changed
    assert all(name.startswith((*heads, "logit_scale")) for name in changed)

    clip, config = load_clip(f"local-dir:{tmp_path / 'model'}")
    assert vision_tower(clip.visual, config.embed_dim).image_size == (64, 64)
    texts = TextTower(clip, text_tokenizer(config, tmp_path / "model")).encode(
        [c for i in items for c in i.captions]
    )
    with torch.inference_mode():
        images = nn.functional.normalize(clip.visual.head(data.images), dim=-1).numpy()
    similarities = texts @ images.T
    ranks = (
        similarities > similarities[np.arange(32), np.arange(32) // 2][:, None]
    ).sum(1)
    assert recalls["t2i R@1"] == pytest.approx(100 * (ranks < 1).mean(), abs=100 / 32)
    # 6 by chance
    assert recalls["t2i R@1"] > 12


def test_a_packed_bundle_is_restored(towers, tmp_path):
    """Up to the rounding of new weights; the score weights are unchanged."""
    model = tiny_model(towers)
    # its vocabulary has one more row, <image>
    joint = load_language_model(towers / TEXT_TOWER, 12)
    with torch.no_grad():
        joint.language_model.bert.encoder.layer[1].output.dense.weight.add_(
            0.01 * torch.randn(16, 32)
        )
    bundle = ModelBundle(
        clip=model.clip,
        clip_config=model.config,
        text_tokenizer=model.tokenizer,
        adapter=build_adapter(
            AdapterConfig("compressed", 4, 64, 16, hidden_dim=32, num_heads=2)
        ),
        joint=joint,
        trained=True,
        score=DirectionWeights(t2i=ScoreWeights(embedding=0.75)),
    )
    before = bundle.save(tmp_path / "trained")
    packed = pack_model(tmp_path / "trained", towers, tmp_path / "packed")
    bases = {
        name: load_arrays(towers / name / TOWER_WEIGHTS)
        for name in (IMAGE_TOWER, TEXT_TOWER)
    }
    unpack_model(tmp_path / "packed", bases, tmp_path / "made")
    made = read_bundle_info(tmp_path / "made")
    assert made.fingerprint == packed.fingerprint
    assert (made.score, made.trained) == (before.score, True)
    weights = (VISION_WEIGHTS, ADAPTER_WEIGHTS, JOINT_WEIGHTS)
    assert not any(
        (tmp_path / "packed" / BUNDLE_FOLDER / name).exists() for name in weights
    )
    blocks = torch.randn(2, 4, 16)
    scores = [
        ModelBundle.load(tmp_path / name).joint.score("a dog", blocks)
        for name in ("trained", "made")
    ]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=0)

    flip(tmp_path / "packed" / TENSORS_FILE, -1)
    with pytest.raises(ModelError, match="has changed since the bundle was made"):
        unpack_model(tmp_path / "packed", bases, tmp_path / "damaged")
