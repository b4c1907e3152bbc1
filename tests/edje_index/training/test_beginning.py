from __future__ import annotations

import numpy as np
import torch

from edje_index.adapter import CompressionAdapter
from edje_index.bundle import ModelBundle
from edje_index.training.beginning import begin_fitted
from edje_index.words import content_words


def fitted(case, content=None) -> CompressionAdapter:
    torch.manual_seed(0)
    bundle = ModelBundle.load(case.bundle)
    adapter = bundle.adapter
    assert isinstance(adapter, CompressionAdapter)
    counted = content_words(bundle.joint.tokenizer) if content is None else content
    begin_fitted(adapter, case.source(), bundle.joint.text_embeddings.weight.detach(), counted)
    return adapter


def test_the_beginning_is_decided_by_the_seed(case):
    first, second = fitted(case).state_dict(), fitted(case).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tokens_begin_around_the_mean_word(case):
    bundle = ModelBundle.load(case.bundle)
    mean = bundle.joint.text_embeddings.weight.mean(dim=0)
    assert torch.equal(fitted(case).projection.bias, mean)
    assert not torch.equal(bundle.adapter.projection.bias, mean)


def test_captions_without_content_words_leave_the_projection(case):
    bundle = ModelBundle.load(case.bundle)
    nothing = np.zeros(len(content_words(bundle.joint.tokenizer)), dtype=np.bool_)
    assert torch.equal(fitted(case, nothing).projection.weight, bundle.adapter.projection.weight)
