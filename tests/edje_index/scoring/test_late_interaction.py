"""Late interaction, against the training loss and on captions without content words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edje_index.scoring.late_interaction import late_interaction
from edje_index.training.step import alignment_scores


def test_pairs_score_as_in_the_alignment_phase():
    """The training loss, which has an oracle of its own, is the reference."""
    generator = torch.Generator().manual_seed(0)
    words, tokens = torch.randn(30, 8, generator=generator), torch.randn(4, 5, 8, generator=generator)
    captions = [[1, 2, 2, 29], [7], [8, 9, 3], []]
    content = np.arange(30) != 3
    mean = words.mean(dim=0)
    shares = torch.zeros(30, 4)
    for at, caption in enumerate(captions):
        kept = [word for word in caption if content[word]]
        for word in kept:
            shares[word, at] += 1 / len(kept)
    expected = alignment_scores(tokens - mean, words - mean, shares).diagonal()
    torch.testing.assert_close(late_interaction(captions, tokens, words, content), expected)
    assert expected[3] == 0


@pytest.mark.parametrize("captions", [[[]], [[3], []]])
def test_captions_without_any_word_score_nothing(captions):
    tokens, words, content = torch.ones(len(captions), 2, 8), torch.randn(5, 8), np.arange(5) != 3
    assert late_interaction(captions, tokens, words, content).tolist() == [0.0] * len(captions)
