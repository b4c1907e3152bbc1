"""The adapters for clips: the two strategies of the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.parts import load_adapter
from edje_index.errors import ModelError
from edje_index.indexing.image_encoder import image_tokens
from edje_index.models.adapter import (
    COMPRESSED,
    FRAME_EMBEDDINGS,
    FRAME_TOKENS,
    PRUNED,
    TEMPORAL,
    AdapterConfig,
    TemporalAdapter,
    build_adapter,
)

IMAGE = AdapterConfig(COMPRESSED, num_tokens=3, vision_dim=8, language_dim=6, hidden_dim=10, num_heads=2)
CONFIGS = {
    FRAME_EMBEDDINGS: AdapterConfig(FRAME_EMBEDDINGS, 2, 4, 6, hidden_dim=10, num_heads=2, frames=5),
    FRAME_TOKENS: AdapterConfig(FRAME_TOKENS, 2, 6, 6, hidden_dim=10, num_heads=3, frames=5, frame_adapter=IMAGE),
}
GENERATOR = torch.Generator().manual_seed(0)
PATCHES = torch.randn(2, 5, 9, 8, generator=GENERATOR)
EMBEDDINGS = torch.randn(2, 5, 4, generator=GENERATOR)


def adapter_of(kind: str) -> TemporalAdapter:
    adapter = build_adapter(CONFIGS[kind])
    assert isinstance(adapter, TemporalAdapter)
    return adapter.requires_grad_(False)


def by_hand(adapter: TemporalAdapter) -> torch.Tensor:
    """The tokens of both clips: attention written out for each clip, frame and head."""
    compression, blocks = adapter.compression, []
    assert compression is not None
    for patches, embeddings in zip(PATCHES, EMBEDDINGS, strict=True):
        rows = []
        for frame in range(5):
            tokens = embeddings[frame][None]
            if adapter.frame_adapter is not None:
                tokens = adapter.frame_adapter(patches[frame][None])[0]
            rows += [token + adapter.position[frame, 0] for token in tokens]
        sequence = torch.stack(rows)
        inputs = compression.query[0], compression.key(sequence), compression.value(sequence)
        parts = compression.attention.in_proj_weight.chunk(3), compression.attention.in_proj_bias.chunk(3)
        query, key, value = (
            functional.linear(each, *part).unflatten(1, (adapter.config.num_heads, -1)).transpose(0, 1)
            for each, *part in zip(inputs, *parts, strict=True)
        )
        weights = (query @ key.transpose(1, 2) / key.shape[-1] ** 0.5).softmax(dim=-1)
        attended = compression.attention.out_proj((weights @ value).transpose(0, 1).flatten(1))
        hidden = functional.gelu(compression.mlp.fc1(compression.layernorm(attended)))
        blocks.append(compression.projection(attended + compression.mlp.fc2(hidden)))
    return torch.stack(blocks)


@pytest.mark.parametrize("kind", TEMPORAL)
def test_queries_attend_to_the_tokens_of_all_frames_with_their_positions(kind: str) -> None:
    adapter = adapter_of(kind)
    tokens = adapter.of_frames(PATCHES, EMBEDDINGS)
    assert tokens.shape == (2, 2, 6)
    torch.testing.assert_close(tokens, by_hand(adapter))
    backwards = adapter.of_frames(PATCHES.flip(1), EMBEDDINGS.flip(1))
    assert not torch.allclose(tokens, backwards, atol=1e-5)
    adapter.position.zero_()  # without positions, the order of the frames does not count
    unordered = adapter.of_frames(PATCHES, EMBEDDINGS)
    torch.testing.assert_close(unordered, adapter.of_frames(PATCHES.flip(1), EMBEDDINGS.flip(1)))


@pytest.mark.parametrize("kind", TEMPORAL)
def test_features_are_what_the_trained_part_reads(kind: str) -> None:
    adapter = adapter_of(kind)
    features = adapter.features(patches=9)
    assert features.config.is_feature
    stored = features.of_frames(PATCHES, EMBEDDINGS)
    assert stored.shape == (2, features.config.num_tokens, features.config.language_dim)
    assert torch.equal(adapter(stored), adapter.of_frames(PATCHES, EMBEDDINGS))


def test_the_adapter_of_the_frames_is_not_trained() -> None:
    adapter = adapter_of(FRAME_TOKENS)
    adapter.train_weights()
    trained = {name for name, weights in adapter.named_parameters() if weights.requires_grad}
    assert "position" in trained
    assert "compression.query" in trained
    assert not any(name.startswith("frame_adapter.") for name in trained)


@pytest.mark.parametrize("kind", TEMPORAL)
def test_bundles_keep_the_adapter(
    kind: str, tiny_model: ModelBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny_model.adapter.config
    changes = {"frame_adapter": image, "vision_dim": image.language_dim} if kind == FRAME_TOKENS else {"vision_dim": 24}
    config = replace(image, kind=kind, frames=3, num_heads=2, **changes)
    bundle = replace(tiny_model, adapter=build_adapter(config), info=None)
    info = bundle.save(tmp_path / "video")
    assert (info.frames, info.combines_frames) == (3, True)
    loaded = load_adapter(info)
    assert loaded.config == config
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    encode, batches = tiny_model.vision.encode, []

    def counted(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batches.append(len(batch))
        return encode(batch)

    monkeypatch.setattr(tiny_model.vision, "encode", counted)
    with torch.no_grad():
        still, embedding = image_tokens(tiny_model.vision, loaded, pixels)
        clip, _ = image_tokens(tiny_model.vision, bundle.adapter, pixels[:, None].expand(-1, 3, -1, -1, -1))
    torch.testing.assert_close(still, clip)
    assert batches == [1, 3]  # the tower encodes an image once
    torch.testing.assert_close(embedding, tiny_model.vision.encode(pixels)[1])
    with pytest.raises(ModelError, match=r"widths? (8|25)"):
        replace(bundle, adapter=build_adapter(wrong(config)), info=None).save(tmp_path / "wrong")


def wrong(config: AdapterConfig) -> AdapterConfig:
    """An adapter for another vision tower."""
    if config.frame_adapter is None:
        return replace(config, vision_dim=25, num_heads=5)
    return replace(config, frame_adapter=replace(config.frame_adapter, vision_dim=8))


def test_adapters_of_images_keep_their_fingerprints() -> None:
    assert set(IMAGE.to_json()) == {
        *("kind", "num_tokens", "vision_dim", "language_dim"),
        *("hidden_dim", "num_heads", "activation", "layer_norm_eps"),
    }
    for config in (IMAGE, *CONFIGS.values()):
        assert AdapterConfig.from_json(config.to_json(), Path("bundle.json")) == config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(CONFIGS[FRAME_EMBEDDINGS], frames=None), "frames of a frame-embeddings adapter must be 1 to 256"),
        (replace(CONFIGS[FRAME_EMBEDDINGS], frames=0), "must be 1 to 256, got 0"),
        (replace(CONFIGS[FRAME_EMBEDDINGS], frames=10**9), "must be 1 to 256"),
        (replace(CONFIGS[FRAME_EMBEDDINGS], frames="5"), "must be 1 to 256, got 5"),
        (replace(CONFIGS[FRAME_EMBEDDINGS], frame_adapter=IMAGE), "only a frame-tokens adapter has a frame_adapter"),
        (replace(CONFIGS[FRAME_TOKENS], frame_adapter=None), "only a frame-tokens adapter has a frame_adapter"),
        (replace(CONFIGS[FRAME_TOKENS], frame_adapter=replace(IMAGE, kind=PRUNED)), "must be of the kind compressed"),
        (replace(CONFIGS[FRAME_TOKENS], frame_adapter=CONFIGS[FRAME_TOKENS]), "must be of the kind compressed"),
        (replace(CONFIGS[FRAME_TOKENS], vision_dim=9), "make tokens of width 9"),
        (replace(CONFIGS[FRAME_TOKENS], num_heads=4), "not divisible by 4 heads"),
        (replace(IMAGE, frames=5), "has neither frames nor a frame_adapter"),
    ],
)
def test_sizes_that_do_not_fit(config: AdapterConfig, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_adapter(config)
