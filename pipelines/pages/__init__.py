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
from numpy.typing import NDArray

from edje_index.inputs.thumbnails import read_thumbnails
from edje_index.scoring.weights import PART_NAMES
from edje_index.search.hits import rank_hits
from storage_formats.extras import name_missing_extra

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL import Image

    from edje_index.evaluation.explain import Explanation
    from edje_index.search.hits import Hits
    from edje_index.search.token_index import TokenIndex

MAX_SHOWN = 100
"""Maximum number of hits that a page shows before and after re-ranking. The page
contains a thumbnail of each hit.
"""
# pixels of the image under an attention map
_MAP_SIDE = 160
# opacity, of 255, over a patch without attention
_DARKEST = 230


def search_page(
    index: TokenIndex,
    query: str,
    hits: Hits,
    k: int,
    score: str,
    *,
    is_filtered: bool,
    loading: float,
) -> str:
    """Return the HTML page of a search.

    Args:
        index: the searched index.
        query: text of the query.
        hits: every candidate of the search, best first.
        k: number of hits to show before and after re-ranking, at most `MAX_SHOWN`.
        score: the final score.
        is_filtered: whether only some rows were searched.
        loading: seconds in which the index and the model were opened.
    """
    shown = min(k, MAX_SHOWN)
    ranked = rank_hits(hits)
    by_score = ranked[:shown]
    by_embedding = sorted(ranked, key=lambda hit: hit.embedding_rank)[:shown]
    row_ids = sorted({each.hit.row_id for each in [*by_score, *by_embedding]})
    return render(
        "search.html",
        index=index,
        query=query,
        pool=len(hits),
        is_filtered=is_filtered,
        by_embedding=by_embedding,
        by_score=by_score,
        thumbnails={
            thumbnail.row_id: thumbnail
            for thumbnail in read_thumbnails(index.committed, row_ids)
        },
        weights=index.model.weights("t2i", score),
        part_names=PART_NAMES,
        timings={"load index and model": loading, **hits.stages},
    )


def explain_page(explanation: Explanation) -> str:
    """Return the HTML page of an explanation."""
    from PIL import Image

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
        if row.attention is not None:
            maps = [_mask(weights) for weights in row.attention]
        rows.append((row, thumbnail, photo, maps))
    return render("explain.html", page=explanation, rows=rows)


def _mask(weights: NDArray[np.float32]) -> str:
    """Return an image that darkens the patches of an attention map [rows, columns]
    that get little attention.
    """
    from PIL import Image

    # without the root, only the peaks would be visible
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
    from pipelines.progress.wording import printable

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = lambda value: printable(str(value))
    environment.globals["version"] = __version__
    return environment
