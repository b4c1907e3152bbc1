"""What the query bank takes off the scores of candidates, each candidate once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edje_index.evaluation.recall import Floats, Ints
from edje_index.evaluation.token_sources import TokenSource

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle

_AT_ONCE = 256  # candidates: of 64 x 384 bfloat16 blocks 13 MB


def image_priors(model: ModelBundle, rows: Ints, embeddings: Floats, candidates: Ints, source: TokenSource) -> Floats:
    """Priors [q, p] of candidates [q, p]: places among images with row ids [r] and embeddings [r, e]."""
    return _each_once(candidates, lambda at: model.image_priors(embeddings[at], source.fetch(rows[at])))


def caption_priors(model: ModelBundle, captions: Sequence[str], embeddings: Floats, candidates: Ints) -> Floats:
    """Priors [q, p] of candidates [q, p]: places among captions [c] with embeddings [c, e]."""
    return _each_once(candidates, lambda at: model.caption_priors(embeddings[at], [captions[place] for place in at]))


def _each_once(candidates: Ints, priors: Callable[[Ints], Floats]) -> Floats:
    places, which = np.unique(candidates, return_inverse=True)
    parts = [priors(places[start : start + _AT_ONCE]) for start in range(0, len(places), _AT_ONCE)]
    found: Floats = np.concatenate(parts)[which.reshape(candidates.shape)]
    return found
