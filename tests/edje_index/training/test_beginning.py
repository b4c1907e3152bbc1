from __future__ import annotations

import numpy as np
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.adapter import CompressionAdapter
from edje_index.scoring.content_words import content_words
from edje_index.training.model.adapter_init import begin_adapter


def begun(case, start="fitted", content=None) -> CompressionAdapter:
    torch.manual_seed(0)
    bundle = ModelBundle.load(case.bundle)
    adapter = bundle.adapter
    assert isinstance(adapter, CompressionAdapter)
    counted = content_words(bundle.joint.tokenizer) if content is None else content
    begin_adapter(adapter, case.source(align_start=start), bundle.joint.text_embeddings.weight.detach(), counted)
    return adapter


def test_the_beginning_is_decided_by_the_seed(case):
    first, second = begun(case).state_dict(), begun(case).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tokens_begin_around_the_mean_word(case):
    bundle = ModelBundle.load(case.bundle)
    mean = bundle.joint.text_embeddings.weight.mean(dim=0)
    assert torch.equal(begun(case).projection.bias, mean)
    assert not torch.equal(bundle.adapter.projection.bias, mean)


def test_captions_without_content_words_leave_the_projection(case):
    bundle = ModelBundle.load(case.bundle)
    nothing = np.zeros(len(content_words(bundle.joint.tokenizer)), dtype=np.bool_)
    assert torch.equal(begun(case, content=nothing).projection.weight, bundle.adapter.projection.weight)


def test_clusters_alone_leave_the_projection(case):
    bundle = ModelBundle.load(case.bundle)
    adapter = begun(case, "clusters")
    assert torch.equal(adapter.projection.weight, bundle.adapter.projection.weight)
    assert not torch.equal(adapter.key.weight, bundle.adapter.key.weight)


def test_a_kept_adapter_stays_as_it_is(case):
    bundle = ModelBundle.load(case.bundle)
    after = begun(case, "kept").state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in bundle.adapter.state_dict().items())
