"""Terms of images are computed once, and never returned for another row."""

import numpy as np

from edje_index.scoring import term_cache


def test_rows_get_their_own_terms_although_they_share_slots(monkeypatch):
    monkeypatch.setattr(term_cache, "_SLOTS", 8)
    cache = term_cache.TermCache()
    computed = []
    for rows in np.random.default_rng(0).integers(0, 40, (50, 6)):
        expected = np.stack([rows, -rows], axis=1).astype(np.float32)

        def compute(missing, expected=expected):
            computed.extend(expected[missing])
            return expected[missing]

        np.testing.assert_array_equal(cache.terms(rows, compute), expected)
    assert len(computed) < 300, "some were in the cache"
    np.testing.assert_array_equal(cache.terms(rows[-1:], None), expected[-1:])
