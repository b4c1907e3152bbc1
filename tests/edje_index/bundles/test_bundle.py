"""Model bundles on disk, also those of release 0.1 and of random weights."""

import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from transformers import BertConfig, BertTokenizerFast

from edje_index.bundles import info as bundle_info
from edje_index.bundles.bundle import ModelBundle, write_feature_bundle
from edje_index.bundles.info import (
    INFO_FILE,
    VISION_WEIGHTS,
    read_bundle_info,
)
from edje_index.bundles.random_bundle import (
    TINY,
    create_untrained_bundle,
)
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import ImageEncoder, image_tokens
from edje_index.models import weights
from edje_index.models.adapter import LOCAL, build_adapter
from edje_index.models.text_tower import text_tokenizer
from edje_index.scoring.weights import ScoreWeights
from tests.conftest import REPO, all_files
from tests.edje_index.published_cases import WORDS
from tests.edje_index.towers import random_clip, random_pixels, timm_config
from tests.storage_formats.reading_cases import flip


def test_round_trip_gives_the_same_outputs_and_fingerprints(tiny_model, tmp_path):
    info = tiny_model.save(tmp_path / "copy")
    assert info.fingerprint == tiny_model.info.fingerprint
    assert info.encoder_fingerprint == tiny_model.info.encoder_fingerprint
    pixels = random_pixels(tiny_model.clip_config)
    blocks = torch.randn(2, *tiny_model.block_shape)
    texts = ["a red dog", "snow on a mountain"]
    outputs = [
        (
            *image_tokens(bundle.vision, bundle.adapter, pixels),
            torch.from_numpy(bundle.text.encode(texts)),
            bundle.joint.score(texts, blocks),
        )
        for bundle in (tiny_model, ModelBundle.load(info.path))
    ]
    assert all(torch.equal(left, right) for left, right in zip(*outputs, strict=True))


def test_a_saved_copy_keeps_the_shape_of_a_stored_scalar(tiny_model, tmp_path):
    """As in the shipped model, a number is stored as a tensor of shape [1]."""
    bundle = copy.deepcopy(tiny_model)
    scale = bundle.clip.logit_scale
    scale.data = scale.data.reshape(1)
    first = bundle.save(tmp_path / "first")
    second = ModelBundle.load(first.path).save(tmp_path / "second")
    assert first.files == second.files
    assert first.encoder_fingerprint == second.encoder_fingerprint


@pytest.fixture
def copied(tiny_bundle, tmp_path):
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copied"))


def test_a_changed_or_missing_file_is_noticed(copied):
    weights = copied / VISION_WEIGHTS
    flip(weights, -1)
    for open_bundle in (ModelBundle.load, ImageEncoder.open):
        with pytest.raises(ModelError, match="has changed since the bundle was made"):
            open_bundle(copied)
    weights.unlink()
    for open_bundle in (ModelBundle.load, ImageEncoder.open):
        with pytest.raises(
            ModelError, match=r"lacks vision/open_clip_model\.safetensors"
        ):
            open_bundle(copied)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["adapter"].update(num_heads=1), "fingerprint does not match"),
        (lambda c: c.update(fingerprint="0"), "fingerprint does not match"),
        (lambda c: c.update(format_version=99), "format version 99"),
        (lambda c: c.update(format="other"), "does not describe a model bundle"),
        (lambda c: c.pop("vision"), "damaged"),
        (lambda c: c["vision"].pop("image_size"), "damaged"),
        (lambda c: c["vision"].update(patch_dim="32"), "damaged"),
        (lambda c: c["adapter"].pop("kind"), "damaged"),
        (lambda c: c["joint"].update(text_embed_dim=0), "damaged"),
        (lambda c: c.update(pool=-5), "damaged"),
        (lambda c: c["files"].pop("adapter.safetensors"), "damaged"),
    ],
)
def test_an_edited_description_is_refused(copied, edit, message):
    content = json.loads((copied / INFO_FILE).read_text())
    edit(content)  # type: ignore[operator]
    (copied / INFO_FILE).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        read_bundle_info(copied)


def test_saving_is_whole_or_not_at_all(tiny_model, tiny_bundle, tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        tiny_model.save(tiny_bundle)
    # breaks the last step but one
    tiny_model.joint.tokenizer.tokenizer = None
    with pytest.raises(AttributeError):
        tiny_model.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tiny_model, tmp_path):
    tiny_model.adapter.state_dict()["query"].view(-1)[0] = float("inf")
    with pytest.raises(
        ModelError, match=r"the tensor query of adapter.safetensors contains 1 values"
    ):
        tiny_model.save(tmp_path / "out")
    # as a release without the check wrote it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "check_finite", lambda state, source: None)
        tiny_model.save(tmp_path / "out")
    with pytest.raises(
        ModelError,
        match=r"the tensor query of adapter.safetensors in .*out contains 1 values",
    ):
        ModelBundle.load(tmp_path / "out")
    assert ModelBundle.load(tmp_path / "out", verify=False)


def test_parts_that_do_not_fit_are_refused(tiny_model, tmp_path):
    config = tiny_model.adapter.config
    wrong = {
        "width 40.*width 32": replace(config, vision_dim=40),
        "width 12.*width 16": replace(config, language_dim=12),
        "7 tokens.*has 16 patches": replace(config, kind=LOCAL, num_tokens=7),
        "strided adapter of 20 tokens.*has 16 patches": replace(
            config, kind="strided", num_tokens=20
        ),
    }
    for message, adapter in wrong.items():
        tiny_model.adapter = build_adapter(adapter)
        with pytest.raises(ModelError, match=message):
            tiny_model.save(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [{"size": 224}, {"size": []}, {"use_crop": True}, {"std": [0.0] * 3}, {"mode": ""}],
)
def test_preprocessing_that_does_not_fit_the_tower_is_refused(
    tiny_model, tmp_path, change
):
    tiny_model.clip_config.preprocess.update(change)
    with pytest.raises(ModelError, match=r"preprocessing .*: restore preprocess_cfg"):
        tiny_model.save(tmp_path / "out")


def test_a_feature_bundle_needs_a_positive_number_of_tokens(tiny_bundle, tmp_path):
    with pytest.raises(ModelError, match="num_tokens=0"):
        write_feature_bundle(tiny_bundle, tmp_path / "out", "strided", 0)


def test_stock_open_clip_opens_the_vision_folder(tiny_bundle, tiny_model):
    model, preprocess = open_clip.create_model_from_pretrained(
        f"local-dir:{tiny_bundle / 'vision'}"
    )
    pixels = random_pixels(tiny_model.clip_config)
    expected = model.encode_image(pixels, normalize=True)
    torch.testing.assert_close(
        tiny_model.vision.encode(pixels)[1], expected, atol=1e-6, rtol=0
    )
    assert preprocess.transforms[0].size == 32


def test_hugging_face_text_tower_travels_in_the_bundle(tiny_model, tmp_path):
    """A DINO-like trunk beside a BERT text tower from a local folder, which is gone
    when the bundle is loaded.
    """
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(bert / "vocab.txt")).save_pretrained(bert)
    BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    ).save_pretrained(bert)
    config = timm_config("vit_tiny_patch16_224", 224, pool="token")
    config.model["text_cfg"] = {
        "hf_model_name": str(bert),
        "hf_tokenizer_name": str(bert),
        "context_length": 12,
        "hf_proj_type": "linear",
    }
    sizes = {"vision_dim": 192, "num_heads": 3}
    bundle = replace(
        tiny_model,
        clip=random_clip(config, hf_text=bert),
        clip_config=config,
        text_tokenizer=text_tokenizer(config),
        adapter=build_adapter(replace(tiny_model.adapter.config, **sizes)),
    )
    info = bundle.save(tmp_path / "bundle")
    texts = ["the beach", "a red dog on the beach " * 9, "a"]
    expected = bundle.text.encode(texts)
    shutil.rmtree(bert)
    loaded = ModelBundle.load(tmp_path / "bundle")
    np.testing.assert_array_equal(loaded.text.encode(texts), expected)
    # padding that the tower masks is not computed
    padded = loaded.clip.encode_text(loaded.text_tokenizer(texts), normalize=True)
    np.testing.assert_allclose(expected, padded.numpy(), atol=1e-6)
    assert loaded.save(tmp_path / "again").fingerprint == info.fingerprint


def test_a_path_that_is_not_utf_8_is_refused_with_its_reason(tiny_bundle, tmp_path):
    folder = tmp_path / os.fsdecode(b"mod\xe8le")
    shutil.copytree(tiny_bundle, folder)
    with pytest.raises(ModelError, match=r"is not UTF-8, .*: rename the directory"):
        ModelBundle.load(folder)


GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "model"


def test_a_bundle_that_is_saved_again_keeps_everything(tmp_path):
    old = ModelBundle.load(GOLDEN)
    info = old.save(tmp_path / "again")
    new = ModelBundle.load(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again" / INFO_FILE).read_text())["format_version"] == 2
    )
    assert new.score == old.score
    assert info.encoder_fingerprint == old.info.encoder_fingerprint
    files = read_bundle_info(GOLDEN).files
    assert {name for name in files if info.files.get(name) != files[name]} <= {
        "joint/config.json",
        "bank.safetensors",
    }
    configs = [
        json.loads((folder / "joint" / "config.json").read_text())
        for folder in (GOLDEN, tmp_path / "again")
    ]
    # that of the library that saved it
    assert all(config.pop("transformers_version") for config in configs)
    assert configs[0] == configs[1]
    states = [bundle.pooled.state_dict() for bundle in (old, new)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, ScoreWeights()),
        ({"late_weight": 1.0, "pooled_weight": 2.0}, ScoreWeights(late=1.0)),
    ],
)
def test_weights_that_are_left_out(tmp_path, weights, expected):
    """Parts that the bundle does not hold have no weight."""
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    content = json.loads((GOLDEN / INFO_FILE).read_text())
    content["joint"] = {"text_embed_dim": 24, "prior_weight": 3.0, **weights}
    content["fingerprint"] = bundle_info._stored_fingerprint(content)
    (folder / INFO_FILE).write_text(json.dumps(content))
    info = read_bundle_info(folder)
    assert info.joint == {"text_embed_dim": 24}
    assert info.score.t2i == info.score.i2t == expected


def test_equal_seeds_give_equal_bytes(tiny_bundle, tmp_path):
    create_untrained_bundle(tmp_path / "again", seed=0, sizes=TINY)
    assert all_files(tmp_path / "again") == all_files(tiny_bundle)


def test_default_is_a_small_vit_with_64_by_384_blocks(tmp_path):
    info = create_untrained_bundle(tmp_path / "out")
    assert info.block_shape == (64, 384)
    assert (info.embed_dim, info.vision["num_patches"], info.vision["num_heads"]) == (
        384,
        196,
        6,
    )
    assert info.vision["image_size"] == [224, 224]
    assert info.trained is False
