"""Makes `Work` from each kind of request. The batcher runs the work on the thread of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from edje_index.search.query_image import encode_images
from pipelines.service.batching import Work
from pipelines.service.images import decode_image

if TYPE_CHECKING:
    from edje_index.search.hits import Hits
    from edje_index.search.image_to_text import TextHit
    from edje_index.search.token_index import TokenIndex

_PAIRS_PER_IMAGE = 16  # one pass of the vision tower takes about as long as this many pairs of the joint encoder
_PAIRS_PER_TEXT = 1  # the same for the text tower


@dataclass(frozen=True)
class ScoreOptions:
    """How to re-rank the candidates of a search.

    Attributes:
        pool: number of candidates.
        rerank: True to re-rank the candidates, False to keep the order by embedding similarity.
        score: final score to sort by; None for the score of the bundle.
        where: filter of the rows; None searches all rows.
        joint_pool: number of candidates that the joint encoder scores; None for all.
    """

    pool: int
    rerank: bool
    score: str | None
    where: str | None = None
    joint_pool: int | None = None

    @property
    def joint_pairs(self) -> int:
        """Number of candidates that the joint encoder scores."""
        if not self.rerank:
            return 0
        return self.pool if self.joint_pool is None else min(self.joint_pool, self.pool)


@dataclass(frozen=True)
class ImageOptions:
    """How to search for images that are similar to an image.

    Attributes:
        k: number of hits.
        max_pixels: maximum number of pixels of the image.
        where: filter of the rows; None searches all rows.
    """

    k: int
    max_pixels: int
    where: str | None = None


@dataclass(frozen=True)
class TextOptions:
    """How to search for texts that describe an image.

    Attributes:
        k: number of hits.
        pool: number of texts to re-rank.
        score: final score to sort by; None for the score of the bundle.
        max_pixels: maximum number of pixels of the image.
    """

    k: int
    pool: int
    score: str | None
    max_pixels: int


def search_text(index: TokenIndex, text: str, k: int, options: ScoreOptions) -> Work:
    """Return work that finds the `k` best hits for a text."""
    cost = max(1, options.joint_pairs) * _tokens(index)
    return Work(("search", id(index), options), cost, (text, k), partial(_search_texts, index, options))


def _search_texts(index: TokenIndex, options: ScoreOptions, payloads: Sequence[tuple[str, int]]) -> list[Hits]:
    texts, counts = [text for text, _ in payloads], [k for _, k in payloads]
    hits_of_each = index.search(
        texts,
        max(counts),
        options.pool,
        rerank=options.rerank,
        score=options.score,
        where=options.where,
        joint_pool=options.joint_pool,
    )
    return [hits.first(k) for hits, k in zip(hits_of_each, counts, strict=True)]


def search_image(index: TokenIndex, data: bytes, options: ImageOptions) -> Work:
    """Return work that finds the `k` rows most similar to an encoded image."""

    def run(payloads: Sequence[bytes]) -> list[Hits]:
        images = (decode_image(payload, options.max_pixels) for payload in payloads)
        return [index.search_image(image, options.k, where=options.where) for image in images]

    return Work(("image", id(index), options), _PAIRS_PER_IMAGE * _tokens(index), data, run)


def search_row(index: TokenIndex, row_id: int, k: int, where: str | None = None) -> Work:
    """Return work that finds the `k` rows that pass `where` and are most similar to the row `row_id`."""

    def run(payloads: Sequence[int]) -> list[Hits]:
        return [index.search_row(row, k, where=where) for row in payloads]

    return Work(("row", id(index), k, where), _tokens(index), row_id, run)


def search_texts(index: TokenIndex, image: int | bytes, texts: Sequence[str], options: TextOptions) -> Work:
    """Return work that finds the texts that describe a row, or an encoded image, best."""

    def run(payloads: Sequence[tuple[int | bytes, Sequence[str]]]) -> list[list[TextHit]]:
        return [_texts_of(index, image, texts, options) for image, texts in payloads]

    pairs = min(options.pool, len(texts)) + len(texts) * _PAIRS_PER_TEXT
    pairs += _PAIRS_PER_IMAGE if isinstance(image, bytes) else 0
    return Work(("texts", id(index), options), pairs * _tokens(index), (image, texts), run)


def _texts_of(index: TokenIndex, image: int | bytes, texts: Sequence[str], options: TextOptions) -> list[TextHit]:
    query = decode_image(image, options.max_pixels) if isinstance(image, bytes) else image
    return index.search_texts(query, texts, options.k, options.pool, score=options.score)


def rerank_rows(index: TokenIndex, text: str, row_ids: Sequence[int]) -> Work:
    """Return work that sorts the rows `row_ids` by their score for a text, best first."""

    def run(payloads: Sequence[tuple[str, Sequence[int]]]) -> list[Hits]:
        return index.rerank_each([text for text, _ in payloads], [rows for _, rows in payloads])

    return Work(("rerank", id(index)), len(row_ids) * _tokens(index), (text, row_ids), run)


def score_images(index: TokenIndex, text: str, images: Sequence[bytes], max_pixels: int) -> Work:
    """Return work that computes the scores of encoded images for a text."""

    def run(payloads: Sequence[tuple[str, Sequence[bytes]]]) -> list[list[float]]:
        return [
            index.score_images(text, [decode_image(data, max_pixels) for data in images]) for text, images in payloads
        ]

    cost = len(images) * _PAIRS_PER_IMAGE * _tokens(index)
    return Work(("images", id(index)), cost, (text, images), run)


def embed_texts(index: TokenIndex, texts: Sequence[str]) -> Work:
    """Return work that computes the embeddings of texts."""

    def run(payloads: Sequence[Sequence[str]]) -> list[Any]:
        every = iter(index.model.text.encode([text for texts in payloads for text in texts]).tolist())
        return [list(islice(every, len(texts))) for texts in payloads]

    return Work(("embed", id(index)), len(texts) * _PAIRS_PER_TEXT * _tokens(index), texts, run)


def embed_images(index: TokenIndex, images: Sequence[bytes], max_pixels: int) -> Work:
    """Return work that computes the embeddings of encoded images."""

    def run(payloads: Sequence[Sequence[bytes]]) -> list[Any]:
        return [
            encode_images(index.model.image_encoder, [decode_image(data, max_pixels) for data in images])[1].tolist()
            for images in payloads
        ]

    cost = len(images) * _PAIRS_PER_IMAGE * _tokens(index)
    return Work(("embed images", id(index)), cost, images, run)


def _tokens(index: TokenIndex) -> int:
    return index.manifest.spec.block_shape[0]
