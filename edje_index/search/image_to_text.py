"""Image-to-text search: finds the texts that best describe an image of an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import BUNDLE_SCORE, IMAGE_TO_TEXT, ScoreWeights
from edje_index.search.reranking import check_reranks
from storage_formats.errors import UsageError
from storage_formats.reading.embeddings import read_embeddings

if TYPE_CHECKING:
    from edje_index.search.token_index import TokenIndex


@dataclass(frozen=True)
class TextHit:
    """One result of an image-to-text search.

    Attributes:
        position: position of the text in the argument `texts` of `search_texts`.
        text: the text.
        score: final score, by which hits are sorted.
        embedding_score: cosine similarity of the embeddings of the image and the text.
        parts: values of the parts of the final score, without weights, by part name.
    """

    position: int
    text: str
    score: float
    embedding_score: float
    parts: Mapping[str, float]


def search_texts(
    index: TokenIndex,
    row_id: int,
    texts: Sequence[str],
    *,
    k: int = 10,
    pool: int = 100,
    score: str | ScoreWeights = BUNDLE_SCORE,
) -> list[TextHit]:
    """Return the `k` texts that best describe the image of row `row_id`, best first.

    The search re-ranks the `pool` texts whose embeddings are nearest to the embedding of the image.

    Args:
        index: index that contains the image.
        row_id: row id of the image.
        texts: texts to choose from.
        k: number of hits.
        pool: number of texts to re-rank; at least `k`.
        score: final score to sort by. See `edje_index.scoring.weights.parse_score`.

    Raises:
        UsageError: `texts` is empty or contains a blank text, `k` or `pool` is out of range, `score` is invalid, or the
            row has no embedding.
        ModelError: the bundle has no model for a part of `score`, or `score` needs adapter tokens but the index stores
            patch features.
    """
    if not texts or not all(text.strip() for text in texts):
        raise UsageError("texts is empty or contains a blank text: give at least one text, and no blank text")
    if k < 1 or pool < k:
        raise UsageError(f"k must be at least 1 and at most pool, got k = {k} and pool = {pool}")
    weights = index.model.weights(IMAGE_TO_TEXT, score)
    final = FinalScore.of(weights)
    image = read_embeddings(index.committed, [row_id])[0]
    if np.isnan(image).any():
        raise UsageError(
            f"row {row_id} of {index.root} has no embedding, because its image failed or is a duplicate: "
            "choose another row"
        )
    embeddings = index.model.text.encode(list(texts))
    similarities = embeddings @ image
    nearest = np.argsort(-similarities, kind="stable")[:pool]
    tokens = None
    if reads_tokens(final.parts, IMAGE_TO_TEXT):
        check_reranks(index.model)
        tokens = np.repeat(index.fetch_blocks([row_id]), len(nearest), axis=0)
    captions = [texts[position] for position in nearest]
    pairs = Pairs(captions, tokens, similarities[nearest], embeddings[nearest])
    values = final.compute(index.model.parts(IMAGE_TO_TEXT, weights), pairs)
    scores = final.sum(values)
    return [
        TextHit(
            position=int(nearest[at]),
            text=texts[nearest[at]],
            score=float(scores[at]),
            embedding_score=float(similarities[nearest[at]]),
            parts={part: float(part_values[at]) for part, part_values in values.items()},
        )
        for at in np.argsort(-scores, kind="stable")[:k]
    ]
