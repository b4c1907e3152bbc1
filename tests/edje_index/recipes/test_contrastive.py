"""The embedding model: its loss, its cached features, and open_clip's outputs for the trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from edje_index.errors import ModelError
from edje_index.models.clip_config import WEIGHTS_FILE
from edje_index.models.pretrained_clip import load_clip
from edje_index.models.text_tower import TextTower, text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.recipes.contrastive.config import ContrastiveConfig
from edje_index.recipes.contrastive.embedding_model import EmbeddingRequest, train_embedding
from edje_index.recipes.contrastive.heads import Heads
from edje_index.recipes.contrastive.image_features import PooledTower, image_features
from edje_index.recipes.contrastive.objective import contrastive_loss
from edje_index.recipes.contrastive.text_features import CaptionFeatures, FrozenTextTower, caption_features
from edje_index.recipes.contrastive.towers import start_model
from edje_index.recipes.contrastive.train import PairFeatures, captions_of, recall, train_heads
from storage_formats.errors import UsageError
from tests.edje_index.tiny_towers import coloured_items, tiny_sources

SMALL = ContrastiveConfig(embed_dim=12, epochs=4, batch_size=8, lr=1e-2)


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return tiny_sources(tmp_path_factory.mktemp("towers"))


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return coloured_items(tmp_path_factory.mktemp("coloured") / "images", 16)


def reference_loss(images, texts, scale, ids):
    """The formula, pair by pair, in float64."""
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (images, texts)]
    losses = []
    for left, right in (unit, unit[::-1]):
        for i in range(len(ids)):
            allowed = [j for j in range(len(ids)) if j == i or ids[j] != ids[i]]
            logits = np.array([scale * left[i] @ right[j] for j in allowed])
            losses.append(np.log(np.exp(logits).sum()) - scale * left[i] @ right[i])
    return np.mean(losses)


def test_loss_is_the_formula():
    rng = np.random.default_rng(0)
    images, texts = rng.normal(size=(2, 7, 5))
    ids = np.array([0, 1, 1, 2, 0, 3, 4])
    ours = contrastive_loss(
        torch.from_numpy(images), torch.from_numpy(texts), torch.tensor(np.log(9.0)), torch.from_numpy(ids)
    )
    assert float(ours) == pytest.approx(reference_loss(images, texts, 9.0, ids), abs=1e-9)


@pytest.mark.parametrize("tuned", [0, 1, 2])
def test_features_and_heads_are_open_clips_text_tower(sources, tuned):
    model = start_model(sources, 12, seed=0)
    captions = ["red picture", "a thing", "a green thing number twelve and more"]
    features = caption_features(FrozenTextTower(model.clip.text, model.tokenizer, tuned), captions, quiet)
    heads = Heads(model.clip, tuned)
    with torch.inference_mode():
        ours = heads.text_embedding(features.batch(torch.tensor([2, 0, 1])))
        theirs = model.clip.encode_text(model.tokenizer(captions))[[2, 0, 1]]
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)  # float16 hidden states


def test_folded_standardisation_changes_nothing(sources):
    heads = Heads(start_model(sources, 12, seed=0).clip, 0)
    features = torch.randn(20, heads.mean.shape[0]) * 3 + 1
    heads.standardise(features)
    with torch.inference_mode():
        before = heads.image_embedding(features)
        heads.fold()
        torch.testing.assert_close(heads.image(features), before, atol=1e-5, rtol=1e-5)


def test_trained_model_is_the_one_that_open_clip_and_the_bundle_use(sources, items, tmp_path):
    out = tmp_path / "model"
    config = ContrastiveConfig(embed_dim=12, epochs=30, batch_size=16, lr=3e-2, image_dropout=0, text_dropout=0)
    result = train_embedding(EmbeddingRequest(items, items, sources, config, out, tmp_path / "cache"), quiet, quiet)
    assert result.images == len(items)
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in log[1:]] == list(range(1, 31))
    clip, config = load_clip(f"local-dir:{out}", None)
    tower = vision_tower(clip.visual)
    assert tower.image_size == (64, 64)
    texts = TextTower(clip, text_tokenizer(config, out)).encode([c for item in items for c in item.captions])
    features = PooledTower(clip.visual.trunk, config)
    pooled = torch.from_numpy(image_features(features, [Path(i.path) for i in items], tmp_path / "again", quiet))
    with torch.inference_mode():
        images = torch.nn.functional.normalize(clip.visual.head(pooled), dim=-1).numpy()
    similarities = texts @ images.T
    own = similarities[np.arange(32), np.arange(32) // 2]
    ranks = (similarities > own[:, None]).sum(1)
    assert result.training.recalls["t2i"]["R@5"] == pytest.approx(100 * (ranks < 5).mean(), abs=100 / 32)
    assert result.training.recalls["t2i"]["R@5"] > 60  # 31 by chance


def test_plain_open_clip_takes_the_folder(sources, tmp_path):
    model = start_model(sources, 12, seed=0)
    model.save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "open_clip_config.json").read_text())["model_cfg"]
    config["text_cfg"]["hf_model_name"] = str(tmp_path / "model" / "hf_text")
    plain = open_clip.CustomTextCLIP(**config)
    plain.visual.set_input_size(config["vision_cfg"]["image_size"])
    open_clip.load_checkpoint(plain, str(tmp_path / "model" / WEIGHTS_FILE))
    plain.eval()
    pixels = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(plain.encode_image(pixels), model.clip.encode_image(pixels))


def test_same_seed_same_weights(sources, items, tmp_path):
    weights = []
    for name in ("a", "b"):
        train_embedding(EmbeddingRequest(items, [], sources, SMALL, tmp_path / name, tmp_path / "cache"), quiet, quiet)
        weights.append((tmp_path / name / WEIGHTS_FILE).read_bytes())
    assert weights[0] == weights[1]


def test_only_heads_and_tuned_layers_are_trained(sources, items, tmp_path):
    config = ContrastiveConfig(embed_dim=12, epochs=1, batch_size=8, tune_text=1)
    train_embedding(EmbeddingRequest(items, [], sources, config, tmp_path / "model", tmp_path / "cache"), quiet, quiet)
    before = start_model(sources, 12, seed=0).clip.state_dict()
    after = load_clip(f"local-dir:{tmp_path / 'model'}", None)[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = ("visual.head.", "text.proj.", "text.transformer.encoder.layer.1.", "logit_scale")
    assert changed
    assert all(name.startswith(trained) for name in changed)
    assert {name for name in before if name.startswith(trained[:2])} <= changed


def test_features_resume_where_they_stopped(sources, items, tmp_path):
    model = start_model(sources, 12, seed=0)
    tower = PooledTower(model.clip.visual.trunk, model.config)
    paths = [Path(item.path) for item in items] * 5
    whole = image_features(tower, paths, tmp_path / "whole", quiet)

    class Stopped(Exception):
        pass

    def stop(_, done, __):
        if done >= 32:
            raise Stopped

    with pytest.raises(Stopped):
        image_features(tower, paths, tmp_path / "parts", stop)
    seen = []
    again = image_features(tower, paths, tmp_path / "parts", lambda _, done, __: seen.append(done))
    assert seen == [64, 80]
    np.testing.assert_array_equal(again, whole)


def test_features_are_made_anew_of_images_that_changed_or_came_later(sources, items, tmp_path):
    model = start_model(sources, 12, seed=0)
    tower = PooledTower(model.clip.visual.trunk, model.config)
    paths = [tmp_path / f"{at}.png" for at in range(3)]
    for path, item in zip(paths[:2], items, strict=False):
        shutil.copy(item.path, path)
    first = image_features(tower, paths, tmp_path / "cache", quiet)
    assert np.isnan(first).any(axis=1).tolist() == [False, False, True]
    shutil.copy(items[2].path, paths[2])
    shutil.copy(items[3].path, paths[0])
    paths[1].unlink()
    seen = []
    second = image_features(tower, paths, tmp_path / "cache", lambda _, done, total: seen.append((done, total)))
    assert seen == [(3, 3)]
    fresh = image_features(tower, paths, tmp_path / "other", quiet)
    np.testing.assert_allclose(second, fresh, atol=1e-5)
    assert np.isnan(second).any(axis=1).tolist() == [False, True, False]
    assert not np.allclose(second[0], first[0], atol=1e-3)
    (kept,) = (tmp_path / "cache").glob("*.f32")
    kept.unlink()
    np.testing.assert_allclose(image_features(tower, paths, tmp_path / "cache", quiet), fresh, atol=1e-5)


def test_images_that_cannot_be_read_are_left_out(sources, items, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    bad = [*items, type(items[0])("broken.png", str(broken), ("a broken thing",), None, "broken.png")]
    request = EmbeddingRequest(bad, [], sources, SMALL, tmp_path / "model", tmp_path / "cache")
    result = train_embedding(request, quiet, quiet)
    assert (result.images, result.unreadable) == (16, 1)


def test_recall_counts_both_directions():
    images = torch.eye(3)
    heads = type("Identity", (), {"image_embedding": lambda _, x: x, "text_embedding": lambda _, x: x})()

    class Captions:
        values = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 0], [0.4, 0.5, 1]])

        def __len__(self):
            return 4

        def batch(self, rows):
            return self.values[rows]

    found = recall(heads, PairFeatures(images, Captions(), torch.tensor([0, 0, 1, 2])))
    # The second caption of image 0 is nearest to image 2, and nearer to it than image 2's own caption.
    assert found["t2i"]["R@1"] == 75
    assert found["i2t"]["R@1"] == pytest.approx(200 / 3)


def test_refusals(sources, items, tmp_path):
    data = PairFeatures(torch.zeros(1, 64), CaptionFeatures(np.zeros((1, 16), np.float32)), captions_of([1]))
    heads = Heads(start_model(sources, 12, 0).clip, 0)
    with pytest.raises(ModelError, match="do not fill a batch"):
        train_heads(heads, data, dev=None, config=SMALL, on_record=quiet)
    with pytest.raises(UsageError, match="lr must be positive, got 0"):
        ContrastiveConfig(lr=0)
    too_many = EmbeddingRequest(items, [], sources, ContrastiveConfig(tune_text=3), tmp_path / "o", tmp_path / "c")
    with pytest.raises(UsageError, match="the text tower has only 2"):
        train_embedding(too_many, quiet, quiet)
    with pytest.raises(ModelError, match="exists already"):
        train_embedding(EmbeddingRequest(items, [], sources, SMALL, tmp_path, tmp_path / "c"), quiet, quiet)
