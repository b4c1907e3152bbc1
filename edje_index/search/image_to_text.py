"""Image-to-text search: finds the texts that best describe an image of an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.scoring.final_score import FinalScore
from edje_index.scoring.parts import Pairs, reads_tokens
from edje_index.scoring.weights import BUNDLE_SCORE, IMAGE_TO_TEXT, ScoreWeights
from edje_index.search.query_arguments import hit_counts, query_texts
from edje_index.search.requested_rows import requested_rows
from edje_index.search.reranking import check_reranks
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.reading.embeddings import read_embeddings

if TYPE_CHECKING:
    from edje_index.search.query_image import QueryImage
    from edje_index.search.token_index import TokenIndex


@dataclass(frozen=True)
class TextHit:
    """One result of an image-to-text search.

    Attributes:
        position: position of the text among the texts to choose from.
        text: the text.
        score: final score, by which hits are sorted.
        embedding_score: cosine similarity of the embeddings of the image and the text.
        parts: values of the parts of the final score, without weights, by part name.

    Example:
        >>> from edje_index import TokenIndex
        >>> index = TokenIndex.open("photos.edje")
        >>> hit = index.search_texts(2, ["a dog", "a canoe"], k=1)[0]
        >>> hit.text == ["a dog", "a canoe"][hit.position], sorted(hit.parts)
        (True, ['logit'])
    """

    position: int
    text: str
    score: float
    embedding_score: float
    parts: Mapping[str, float]


def search_texts(
    index: TokenIndex,
    image: int | QueryImage,
    texts: Sequence[str],
    *,
    k: int = 10,
    pool: int = 100,
    score: str | ScoreWeights = BUNDLE_SCORE,
) -> list[TextHit]:
    """Return the `k` texts that best describe `image`. See `TokenIndex.search_texts`."""
    texts = query_texts(texts, "texts")
    if not texts:
        raise UsageError("texts is empty: give at least one text", parameter="texts")
    k, pool = hit_counts(k, pool)
    weights = index.model.weights(IMAGE_TO_TEXT, score)
    final = FinalScore.of(weights)
    needs_tokens = reads_tokens(final.parts, IMAGE_TO_TEXT)
    if needs_tokens:
        check_reranks(index.model)
    block, embedding = _encoded(index, image, needs_tokens=needs_tokens)
    embeddings = index.model.text.encode(texts)
    similarities = embeddings @ embedding
    nearest = np.argsort(-similarities, kind="stable")[:pool]
    captions = [texts[position] for position in nearest]
    tokens = None if block is None else np.repeat(block, len(nearest), axis=0)
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


def _encoded(
    index: TokenIndex, image: int | QueryImage, *, needs_tokens: bool
) -> tuple[Blocks | None, NDArray[np.float32]]:
    """Return the tokens [1, m, d] and the embedding of a row, read from the index, or of an image, encoded now."""
    if isinstance(image, int | np.integer):
        rows = requested_rows(index.committed, [image])
        return index.fetch_blocks(rows.tolist()) if needs_tokens else None, read_embeddings(index.committed, rows)[0]
    from edje_index.search.query_image import encode_images

    tokens, embeddings = encode_images(index.model.image_encoder, [image])
    return tokens, embeddings[0]
