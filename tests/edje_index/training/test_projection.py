from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.models.adapter import AdapterConfig, CompressionAdapter, build_adapter
from edje_index.scoring.late_interaction import late_interaction
from edje_index.training.model.projection_init import begin_at_words
from edje_index.training.model.query_init import begin_at_clusters

KINDS, PATCHES, IMAGES, WIDTH, WORD_WIDTH = 12, 16, 400, 32, 24


@pytest.fixture(scope="module")
def world():
    """Images whose patches are of three kinds each, and captions that name the kinds: (kinds, patches, words)."""
    generator = torch.Generator().manual_seed(1)
    looks = torch.randn(KINDS, WIDTH, generator=generator) * 2
    words = torch.randn(KINDS, WORD_WIDTH, generator=generator) + 3  # around a mean, as those of language models
    kinds = torch.stack([torch.randperm(KINDS, generator=generator)[:3] for _ in range(IMAGES)])
    shown = kinds[:, torch.arange(PATCHES) % 3]
    patches = looks[shown] + 5 + 0.2 * torch.randn(IMAGES, PATCHES, WIDTH, generator=generator)
    return kinds, patches, words


def new_adapter() -> CompressionAdapter:
    torch.manual_seed(0)
    adapter = build_adapter(AdapterConfig("compressed", KINDS, WIDTH, WORD_WIDTH, hidden_dim=64, num_heads=4))
    assert isinstance(adapter, CompressionAdapter)
    return adapter


def recall(adapter, patches, kinds, words) -> float:
    """Part of 100 captions whose own image has the highest late interaction."""
    with torch.no_grad():
        tokens = adapter(patches[:100])
    content = np.ones(KINDS, dtype=np.bool_)
    own = [late_interaction([caption] * 100, tokens, words, content).argmax() for caption in kinds[:100].tolist()]
    same = [set(kinds[at].tolist()) == set(kinds[mine].tolist()) for mine, at in enumerate(own)]
    return float(np.mean(same))


def test_tokens_lie_at_the_words_of_what_they_show(world):
    kinds, patches, words = world
    adapter = new_adapter()
    begin_at_clusters(adapter, patches, torch.Generator().manual_seed(0))
    before = recall(adapter, patches, kinds, words)
    begin_at_words(adapter, patches.mean(dim=1).double(), words[kinds].mean(dim=1).double(), words)
    assert recall(adapter, patches, kinds, words) > max(0.8, before + 0.5)


def test_tokens_have_the_mean_of_the_words_and_their_distance_from_it(world):
    kinds, patches, words = world
    adapter = new_adapter()
    begin_at_clusters(adapter, patches, torch.Generator().manual_seed(0))
    seen = patches.mean(dim=1).double()
    begin_at_words(adapter, seen, words[kinds].mean(dim=1).double(), words)
    with torch.no_grad():
        mapped = adapter.projection((seen - seen.mean(dim=0)).float())
    mean = words.mean(dim=0)
    torch.testing.assert_close(mapped.mean(dim=0), mean, atol=1e-4, rtol=1e-4)
    usual = (words - mean).norm(dim=1).mean()
    torch.testing.assert_close((mapped - mean).norm(dim=1).mean(), usual, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("alike", ["patches", "words"])
def test_images_that_are_all_alike_change_nothing(world, alike):
    kinds, patches, words = world
    adapter = new_adapter()
    before = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    seen, said = patches.mean(dim=1).double(), words[kinds].mean(dim=1).double()
    if alike == "patches":
        seen = torch.ones_like(seen)
    else:
        said = torch.ones_like(said)
    begin_at_words(adapter, seen, said, words)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state_dict().items())
