"""From a published checkpoint and an open_clip tower to a bundle."""

import logging
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.import_models import (
    import_checkpoint,
    load_published_checkpoint,
)
from edje_index.errors import HubUnreachableError, ModelError
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.models.clip_model import hub_access, load_clip
from edje_index.models.weights import save_weights
from tests.edje_index.published_cases import Case, write_case
from tests.edje_index.towers import clip_config, random_clip, random_pixels


@pytest.fixture
def tower(tmp_path):
    """An open_clip folder: width 24, 3 heads, 16 patches."""
    config = clip_config(width=24, head_width=8)
    folder = tmp_path / "tower"
    folder.mkdir()
    config.write(folder)
    save_weights(random_clip(config), folder / "open_clip_model.safetensors")
    return f"local-dir:{folder}", config


@pytest.mark.parametrize("tokens", [6, None], ids=["compressed", "local"])
def test_bundle_of_a_published_checkpoint(tmp_path, tower, tokens):
    vision, config = tower
    write_case(tmp_path / "run", Case(tokens=tokens))
    checkpoint = tmp_path / "run" / "checkpoint.pth"
    info = import_checkpoint(checkpoint, vision, tmp_path / "bundle")
    assert info.block_shape == (tokens or 16, 16)
    assert info.trained
    assert info.canonical_captions
    shutil.rmtree(tmp_path / "tower")
    bundle = ModelBundle.load(tmp_path / "bundle")
    published = load_published_checkpoint(
        checkpoint, tmp_path / "run" / "tokenizer", vision_heads=3, layer_norm_eps=1e-5
    )
    pixels = random_pixels(config)
    patches, embedding = bundle.vision.encode(pixels)
    expected = random_clip(config).encode_image(pixels, normalize=True)
    torch.testing.assert_close(embedding, expected, atol=1e-6, rtol=0)
    blocks = published.adapter(patches)
    stored, embeddings = ImageEncoder.open(tmp_path / "bundle").encode(pixels)
    np.testing.assert_allclose(stored.astype(np.float32), blocks.numpy(), rtol=2**-8)
    np.testing.assert_array_equal(embeddings, embedding.numpy())
    scores = published.score(["a red dog", "the beach"], blocks)
    assert torch.equal(
        bundle.joint.score(["A red, dog!", "The beach."], blocks), scores
    )


def test_refuses_early(tmp_path, tower):
    write_case(tmp_path / "run", Case())
    checkpoint = tmp_path / "run" / "checkpoint.pth"
    with pytest.raises(ModelError, match="exists already"):
        import_checkpoint(checkpoint, tower[0], tmp_path / "run")
    with pytest.raises(ModelError, match="there is no model at"):
        import_checkpoint(tmp_path / "nothing", tower[0], tmp_path / "bundle")
    (tmp_path / "run" / "tokenizer").rename(tmp_path / "elsewhere")
    import_checkpoint(
        checkpoint, tower[0], tmp_path / "bundle", tokenizer_dir=tmp_path / "elsewhere"
    )


def test_without_a_size_images_have_that_of_the_tower(tower):
    """open_clip's own `save_config_for_hf` writes no size."""
    replace(tower[1], preprocess={}).write(Path(tower[0].removeprefix("local-dir:")))
    assert tuple(load_clip(tower[0])[1].preprocess["size"]) == (32, 32)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ("Nope", "has no weights 'Nope'"),
        ("ViT-B-32", r"has no weights .* TAG is one of openai, "),
        ("ViT-B-32:nope", r"has no weights 'ViT-B-32:nope'"),
        ("local-dir:/nowhere", "cannot read /nowhere"),
    ],
)
def test_unknown_towers(vision, message):
    with pytest.raises(ModelError, match=message):
        load_clip(vision)


@pytest.mark.parametrize("vision", ["ViT-B-32:openai", "hf-hub:nobody/nothing"])
def test_unreachable_hub_is_one_clear_line(vision, tmp_path, monkeypatch, capfd):
    from huggingface_hub import constants

    # nothing listens on the discard port
    monkeypatch.setattr(constants, "ENDPOINT", "https://localhost:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        HubUnreachableError, match=r"not reachable.*Give local weights"
    ) as error:
        load_clip(vision)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert constants.HF_HUB_OFFLINE is False


def test_threads_that_take_turns_at_the_hub_leave_its_settings_as_they_were(caplog):
    """A process stayed offline, and silent, once two threads had loaded models at the
    same time.
    """
    from huggingface_hub import constants

    before = (constants.HF_HUB_OFFLINE, logging.root.manager.disable)
    entered = threading.Event()

    def first():
        with hub_access(local_only=True):
            entered.set()
            logging.warning("of this thread")
            time.sleep(0.1)

    def second():
        entered.wait()
        logging.warning("of another thread")
        with hub_access(local_only=True):
            time.sleep(0.2)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (constants.HF_HUB_OFFLINE, logging.root.manager.disable) == before
    assert caplog.messages == ["of another thread"]


def test_says_what_is_missing_or_does_not_fit(tmp_path):
    state = write_case(tmp_path, Case())

    def without(part):
        return {key: value for key, value in state.items() if part not in key}

    wide = {"weight": torch.zeros(20, 24), "bias": torch.zeros(20)}
    wide = {f"vision_projection.projection.{key}": wide[key] for key in wide}
    for content, message in (
        ([1, 2], "is not a checkpoint"),
        *(
            ({"model": without(name)}, "1 tensors missing")
            for name in (
                "vision_projection.value.bias",
                "language_model.bert.encoder.layer.1.output.dense.weight",
            )
        ),
        ({"model": without("vision_projection")}, "missing: vision_projection"),
        (
            {"model": state | wide},
            "width 20, but the joint encoder reads tokens of width 16",
        ),
    ):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ModelError, match=message):
            load_published_checkpoint(
                tmp_path / "other.pth", tmp_path / "tokenizer", vision_heads=3
            )
