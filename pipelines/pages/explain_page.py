"""The HTML page that `edje-index explain` writes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.images.thumbnails import Thumbnail, read_thumbnails
from pipelines.pages.rendering import render
from pipelines.pages.search_page import short_name

if TYPE_CHECKING:
    from PIL import Image

    from edje_index.evaluation.explain import Alignment, ExplainedRow, Explanation, WordCounts

MAX_FREQUENT = 50
_CLOUD_WORDS = 64
_MAP_SIDE = 160  # pixels of the image under an attention map
_DARKEST = 230  # opacity, of 255, over a patch without attention
_SMALLEST, _SPAN = 0.8, 1.8  # font size in rem of the rarest word of an image, and what the most frequent adds


@dataclass(frozen=True)
class _Word:
    text: str
    count: int
    tokens: int
    size: float


@dataclass(frozen=True)
class _Map:
    word: str
    mask: str


@dataclass(frozen=True)
class _Row:
    row_id: int
    name: str
    thumbnail: Thumbnail
    counts: WordCounts
    words: Sequence[_Word]
    photo: str
    maps: Sequence[_Map]
    no_maps: str


@dataclass(frozen=True)
class _Page:
    index: str
    against: str
    precision: str
    trained: bool
    rows: Sequence[_Row]
    sample: int
    counts: WordCounts
    frequent: Sequence[tuple[str, int]]
    alignment: Alignment | None
    bars: Sequence[Sequence[float]]


def explain_page(explanation: Explanation) -> str:
    """Return the HTML page of an explanation."""
    thumbnails = read_thumbnails(explanation.root, [row.row_id for row in explanation.rows])
    rows = [_row(row, thumbnail) for row, thumbnail in zip(explanation.rows, thumbnails, strict=True)]
    page = _Page(
        index=str(explanation.root),
        against=str(explanation.against),
        precision=explanation.precision,
        trained=explanation.trained,
        rows=rows,
        sample=explanation.sample,
        counts=explanation.words,
        frequent=explanation.words.words[:MAX_FREQUENT],
        alignment=explanation.alignment,
        bars=_bars(explanation.alignment),
    )
    return render("explain.html", page=page)


def _row(row: ExplainedRow, thumbnail: Thumbnail) -> _Row:
    photo, maps = "", []
    if row.attention.weights is not None and row.attention.pixels is not None:
        photo = _photo(row.attention.pixels)
        words = zip(row.token_words, row.attention.weights, strict=True)
        maps = [_Map(word, _mask(weights)) for word, weights in words]
    return _Row(
        row_id=row.row_id,
        name=short_name(row.uri),
        thumbnail=thumbnail,
        counts=row.words,
        words=_cloud(row.words),
        photo=photo,
        maps=maps,
        no_maps=row.attention.problem,
    )


def _photo(pixels: NDArray[np.uint8]) -> str:
    """Return a small copy of the image that the vision tower read, as a data URI."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_MAP_SIDE, _MAP_SIDE))
    return _data_uri(image, "JPEG")


def _mask(weights: NDArray[np.float32]) -> str:
    """Return an image that darkens the patches of an attention map [rows, columns] that get little attention."""
    from PIL import Image

    alpha = _DARKEST * (1 - np.sqrt(weights / weights.max()))  # without the root, only the peaks would be visible
    return _data_uri(Image.fromarray(np.stack([np.zeros_like(alpha), alpha], axis=2).astype(np.uint8)), "PNG")


def _data_uri(image: Image.Image, kind: str) -> str:
    content = io.BytesIO()
    image.save(content, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def _cloud(counts: WordCounts) -> list[_Word]:
    """Return the most frequent words with their sizes in a word cloud."""
    most = counts.words[0][1]
    return [
        _Word(text, count, counts.tokens, _SMALLEST + _SPAN * ((count - 1) / max(1, most - 1)) ** 0.5)
        for text, count in counts.words[:_CLOUD_WORDS]
    ]


def _bars(alignment: Alignment | None) -> list[list[float]]:
    """Return the bin heights of one or two histograms: one list per bin, values between 0 and 100."""
    if alignment is None:
        return []
    counts = [alignment.first.counts] + ([alignment.second.counts] if alignment.second else [])
    highest = max(map(max, counts))
    return [[100 * count / highest for count in bin_counts] for bin_counts in zip(*counts, strict=True)]
