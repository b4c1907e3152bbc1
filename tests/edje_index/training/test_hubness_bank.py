from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edje_index.bundles.bundle import ModelBundle
from edje_index.training.fitting.hubness_bank import make_hubness_bank
from edje_index.training.fitting.pooled_similarity import fit_pooled_similarity
from edje_index.training.model.trained_part import trained_part
from storage_formats.format.manifest import CommittedIndex
from storage_formats.reading.embeddings import read_embeddings


@pytest.mark.parametrize("count", [9, 1000])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_bank_holds_captions_and_images_of_the_training(case, count, pooled):
    """Each vector is one of those that the plain computation gives, and none comes twice."""
    bundle, source, reports = ModelBundle.load(case.bundle), case.source(), []
    adapter, index = trained_part(bundle.adapter), CommittedIndex.open(case.features)
    if pooled:
        bundle = replace(bundle, pooled=fit_pooled_similarity(adapter, bundle.joint, source, 4), info=None)
    vectors = bundle.pooled_vectors
    bank = make_hubness_bank(adapter, vectors, source, count, lambda *report: reports.append(report[1:]))
    data = source.data
    texts = [
        bundle.joint.tokenizer.tokenizer.decode(data.caption(at).tolist()) for at in range(len(data.text_embeddings))
    ]
    embedded = read_embeddings(index, data.rows)
    with torch.no_grad():
        tokens = adapter(source.features.fetch(data.rows).float()).bfloat16()
    found = {
        "captions": (bank.caption_embeddings, bank.caption_vectors),
        "images": (bank.image_embeddings, bank.image_vectors),
    }
    wanted = {
        "captions": (data.text_embeddings, vectors.of_captions(texts).numpy()),
        "images": (embedded, vectors.of_images(tokens).numpy()),
    }
    for name, (embeddings, pooled_vectors) in found.items():
        all_embeddings, all_vectors = wanted[name]
        assert len(embeddings.codes) == len(pooled_vectors.codes) == min(count, len(all_embeddings))
        places = (embeddings.dense().numpy() @ all_embeddings.T).argmax(axis=1)
        np.testing.assert_allclose(embeddings.dense().numpy(), all_embeddings[places], atol=5e-3)
        np.testing.assert_allclose(pooled_vectors.dense().numpy(), all_vectors[places], atol=1e-2)
        assert pooled_vectors.codes.shape[1] == (4 if pooled else 0)
    total = min(count, 48) + min(count, 24)
    assert reports == ([(0, total), (min(count, 48), total)] if pooled else [])
    again = make_hubness_bank(adapter, vectors, source, count)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in bank.state_dict().items())
