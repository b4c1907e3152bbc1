"""Self-contained HTML pages that commands write: the hits of a search, and the explanation of tokens.

Every value is HTML-escaped by the templates.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edje_index.images.thumbnails import read_thumbnails
from edje_index.scoring.weights import PART_NAMES, ScoreWeights
from edje_index.search.hits import rank_hits
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL import Image

    from edje_index.evaluation.explain import Alignment, Explanation, WordCounts
    from edje_index.search.hits import Hit
    from storage_formats.format.object_store import IndexLocation

MAX_SHOWN = 100
"""Maximum number of hits that a page shows before and after re-ranking. The page contains a thumbnail of each hit."""
_FREQUENT_WORDS = 50
_CLOUD_WORDS = 64
_MAP_SIDE = 160  # pixels of the image under an attention map
_DARKEST = 230  # opacity, of 255, over a patch without attention
_SMALLEST, _SPAN = 0.8, 1.8  # font size in rem of the rarest word of an image, and what the most frequent adds


def search_page(
    pool: Sequence[Hit],
    k: int,
    *,
    root: IndexLocation,
    query: str,
    precision: str,
    weights: ScoreWeights,
    trained: bool,
    is_filtered: bool,
    timings: Mapping[str, float],
) -> str:
    """Return the HTML page of a search.

    Args:
        pool: every candidate of the search, best first.
        k: number of hits to show before and after re-ranking, at most `MAX_SHOWN`.
        root: directory or URL of the index.
        query: text of the query.
        precision: precision of the tokens.
        weights: weights of the final score.
        trained: False if the model has random weights.
        is_filtered: whether only some rows were searched.
        timings: seconds by stage.
    """
    shown, ranked = min(k, MAX_SHOWN), rank_hits(pool)
    by_score = ranked[:shown]
    by_embedding = sorted(ranked, key=lambda hit: hit.embedding_rank)[:shown]
    row_ids = sorted({each.hit.row_id for each in [*by_score, *by_embedding]})
    stayed = sum(each.rank == each.embedding_rank for each in by_score)
    entered = sum(each.embedding_rank > shown for each in by_score)
    summary = f"Of the first {len(by_score)}, {stayed} kept their rank and {entered} came from further down."
    best = max(by_score, key=lambda each: each.embedding_rank - each.rank, default=None)
    if best is None:
        summary = "No photo passes the filter." if is_filtered else "There are no hits."
    elif best.embedding_rank > best.rank:
        name = _short_name(best.hit.uri)
        summary += f" The largest rise is that of {name}: from {best.embedding_rank} to {best.rank}."
    return _render(
        "search.html",
        index=str(root),
        query=query,
        precision=precision,
        trained=trained,
        pool=len(pool),
        summary=summary,
        by_embedding=by_embedding,
        by_score=by_score,
        thumbnails={thumbnail.row_id: thumbnail for thumbnail in read_thumbnails(root, row_ids)},
        weights=weights.by_part(),
        part_names=PART_NAMES,
        formula=weights.described(),
        timings=timings,
    )


def explain_page(explanation: Explanation) -> str:
    """Return the HTML page of an explanation."""
    thumbnails = read_thumbnails(explanation.root, [row.row_id for row in explanation.rows])
    photos = ["" if row.pixels is None else _photo(row.pixels) for row in explanation.rows]
    maps = [[] if row.attention is None else [_mask(weights) for weights in row.attention] for row in explanation.rows]
    return _render(
        "explain.html",
        page=explanation,
        rows=list(zip(explanation.rows, thumbnails, photos, maps, strict=True)),
        frequent=explanation.words.words[:_FREQUENT_WORDS],
        bars=_bars(explanation.alignment),
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


def _cloud(counts: WordCounts) -> list[tuple[str, int, float]]:
    """Return the most frequent words with their counts and font sizes."""
    most = counts.words[0][1]
    return [
        (text, count, _SMALLEST + _SPAN * ((count - 1) / max(1, most - 1)) ** 0.5)
        for text, count in counts.words[:_CLOUD_WORDS]
    ]


def _bars(alignment: Alignment | None) -> list[list[float]]:
    """Return the bin heights of one or two histograms: one list per bin, values between 0 and 100."""
    if alignment is None:
        return []
    counts = [alignment.first.counts] + ([alignment.second.counts] if alignment.second else [])
    highest = max(map(max, counts))
    return [[100 * count / highest for count in bin_counts] for bin_counts in zip(*counts, strict=True)]


def _short_name(uri: str) -> str:
    """Return the last part of a path, or the name of an archive member."""
    return PurePath(uri.rpartition("!")[2]).name or uri


@name_missing_extra("search")
def _render(template: str, **values: Any) -> str:
    """Render the template `templates/<template>` with `values`. Return the HTML page."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from edje_index import __version__
    from pipelines.progress.wording import printable

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(printable=lambda value: printable(str(value)), short_name=_short_name, cloud=_cloud)
    environment.globals["version"] = __version__
    return environment
