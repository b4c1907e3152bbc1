"""Self-contained HTML pages that commands write: the hits of a search, and the
explanation of tokens.

Every value is HTML-escaped by the templates.
"""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edje_index.inputs.thumbnails import read_thumbnails
from edje_index.scoring.weights import PART_NAMES, WEAK_RELEVANCE
from edje_index.search.hits import rank_hits
from storage_formats.arrays import Floats
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL import Image

    from edje_index.evaluation.explain import Explanation, QueryMatch
    from edje_index.search.hits import Hits
    from edje_index.search.token_index import TokenIndex

MAX_SHOWN = 100
"""Maximum number of hits in each of the two lists of a page, before and after
re-ranking. The page contains a thumbnail of each hit.
"""
# number of words in the table of frequent words
_FREQUENT = 50
# length in pixels of the longer side of the image under an attention map
_MAP_SIDE = 160
# opacity between 0 and 255 of the black over a patch that gets no attention
_DARKEST = 230


def search_page(
    index: TokenIndex,
    query: str,
    hits: Hits,
    k: int,
    score: str,
    min_relevance: float,
    *,
    is_filtered: bool,
) -> str:
    """Return the HTML page of a search.

    Args:
        index: the searched index.
        query: text of the query.
        hits: every candidate of the search, best first.
        k: number of hits to show before and after re-ranking. At most `MAX_SHOWN` hits
            are shown.
        score: the final score, as in `TokenIndex.open`.
        min_relevance: hits with a lower relevance are not shown, but they count in the
            ranks of the other hits.
        is_filtered: whether the search was limited to the rows that pass a filter.
    """
    shown = min(k, MAX_SHOWN)
    ranked = [
        each for each in rank_hits(hits) if (each.hit.relevance or 0.0) >= min_relevance
    ]
    by_score = ranked[:shown]
    by_embedding = sorted(ranked, key=lambda hit: hit.embedding_rank)[:shown]
    first_weak = None
    if index.model.info.trained:
        strong = [
            each for each in by_score if (each.hit.relevance or 0) >= WEAK_RELEVANCE
        ]
        first_weak = len(strong)
    row_ids = sorted({each.hit.row_id for each in [*by_score, *by_embedding]})
    return render(
        "search.html",
        index=index,
        query=query,
        pool=len(hits),
        is_filtered=is_filtered,
        by_embedding=by_embedding,
        by_score=by_score,
        first_weak=first_weak,
        thumbnails={
            thumbnail.row_id: thumbnail
            for thumbnail in read_thumbnails(index.committed, row_ids)
        },
        weights=index.model.weights("t2i", score),
        part_names=PART_NAMES,
        timings=hits.stages,
    )


def explain_page(explanation: Explanation) -> str:
    """Return the HTML page of an explanation."""
    from PIL import Image

    from edje_index.evaluation.explain import is_whole_word

    thumbnails = read_thumbnails(
        explanation.root, [row.row_id for row in explanation.rows]
    )
    rows = []
    for row, thumbnail in zip(explanation.rows, thumbnails, strict=True):
        photo = ""
        maps = []
        if row.pixels is not None:
            image = Image.fromarray(row.pixels)
            image.thumbnail((_MAP_SIDE, _MAP_SIDE))
            photo = _data_uri(image, "JPEG")
        if row.attention is not None and row.match is not None:
            maps = _match_maps(row.match, row.attention)
        elif row.attention is not None:
            words = row.token_words
            maps = list(zip(map(_mask, row.attention), words, strict=True))
        rows.append((row, thumbnail, photo, maps))
    counts = explanation.words.words
    whole_words = [(word, count) for word, count in counts if is_whole_word(word)]
    return render(
        "explain.html",
        page=explanation,
        rows=rows,
        part_names=PART_NAMES,
        whole_words=whole_words[:_FREQUENT],
    )


def _match_maps(match: QueryMatch, attention: Floats) -> list[tuple[str, str]]:
    """Return attention maps that show where the image matches the query, as (data URI,
    label) pairs: one map for the late interaction, one for the joint encoder, and one
    for each word of the query. A map is left out if its weights are all 0.

    A map is a weighted sum of the attention of the tokens. `attention` [m, rows,
    columns] says for each of the m tokens which patches the token was computed from.
    The rows and columns are those of the grid of patches.
    """
    # Late interaction compares each word with its most similar token only. `nearest`
    # [words, m] holds these similarities, and 0 elsewhere. The lower limit of 1e-6
    # gives that token a weight even if its similarity is not positive.
    nearest = np.zeros_like(match.similarities)
    best = match.similarities.argmax(axis=1)
    words = np.arange(len(best))
    nearest[words, best] = match.similarities[words, best].clip(min=1e-6)
    weights = [
        (nearest.sum(axis=0), "all words: late interaction"),
        (match.drops.clip(min=0), "joint encoder: tokens it needs"),
    ]
    for word, similarities, token in zip(match.words, nearest, best, strict=True):
        weights.append((similarities, f"{word} {similarities[token]:.2f}"))
    return [
        (_mask(np.tensordot(of_tokens, attention, 1)), label)
        for of_tokens, label in weights
        if of_tokens.any()
    ]


def _mask(weights: Floats) -> str:
    """Return the data URI of a PNG image that is laid over a photo. The image darkens
    the patches that have small `weights` [rows, columns].
    """
    from PIL import Image

    # The square root brightens medium weights. Without it, only the patches with the
    # largest weights would be visible.
    alpha = _DARKEST * (1 - np.sqrt(weights / weights.max()))
    pixels = np.stack([np.zeros_like(alpha), alpha], axis=2).astype(np.uint8)
    return _data_uri(Image.fromarray(pixels), "PNG")


def _data_uri(image: Image.Image, kind: str) -> str:
    content = io.BytesIO()
    image.save(content, kind)
    encoded = base64.b64encode(content.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{encoded}"


@name_missing_extra("search")
def render(template: str, **values: Any) -> str:
    """Render the template `templates/<template>` with `values`. Return the HTML
    page.
    """
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from edje_index import __version__
    from edje_index.inputs.containers import split_uri
    from pipelines.progress.wording import printable

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = lambda value: printable(str(value))
    environment.filters["split_uri"] = split_uri
    environment.globals["version"] = __version__
    return environment
