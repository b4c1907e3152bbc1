"""What depends on an image alone is computed once, and never returned for another
row.
"""

from types import SimpleNamespace

import numpy as np
import torch

from edje_index.scoring import parts
from edje_index.scoring.parts import Images


def test_rows_get_their_own_values_although_they_share_slots(monkeypatch):
    monkeypatch.setattr(parts, "_SLOTS", 8)
    computed = []

    def images(tokens):
        computed.extend(tokens)
        return Images(tokens, tokens[:, :1], -tokens)

    scorer = SimpleNamespace(pooled_dim=1, images=images)
    cache = parts.ImageCache(scorer, 1)
    for rows in np.random.default_rng(0).integers(0, 40, (50, 6)):
        tokens = torch.from_numpy(rows[:, None].astype(np.float32))
        found = cache.images(rows, tokens)
        assert found.tokens is tokens
        torch.testing.assert_close(found.pooled, tokens)
        torch.testing.assert_close(found.token_scales, -tokens)
    assert len(computed) < 300, "some were in the cache"
    scorer.images = None
    torch.testing.assert_close(cache.images(rows[-1:], None).pooled, tokens[-1:])
