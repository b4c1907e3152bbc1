"""The hits of a search. In a notebook, hits are shown as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edje_index.search.reranking import Candidates, CandidateScores
from storage_formats.errors import EdjeError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import read_index_rows

_SHOWN = 50  # images in a notebook; the notebook file contains each image
_SIDE = 160
_TEMPLATE = """<table>
<thead><tr><th>rank</th><th>photo</th><th>score</th><th>embedding</th><th>row</th><th>uri</th></tr></thead>
<tbody>
{% for hit in hits %}
<tr><td>{{ loop.index }}</td>
<td>{% if hit.row_id in images %}<img src="{{ images[hit.row_id] }}" alt="">{% else %}no image{% endif %}</td>
<td>{{ "%.4f" | format(hit.score) }}</td><td>{{ "%.4f" | format(hit.embedding_score) }}</td>
<td>{{ hit.row_id }}</td><td>{{ hit.uri }}</td></tr>
{% endfor %}
</tbody>
</table>{% if more > 0 %}<p>and {{ more }} more</p>{% endif %}
"""


@dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        row_id: row id of the image.
        uri: path or URI of the image.
        score: final score, by which hits are sorted. Without re-ranking, the score is `embedding_score`.
        embedding_score: cosine similarity of the embeddings of the query and the image.
        joint_score: weighted sum of the parts logit, late interaction and pooled similarity. None if the final score
            has none of these parts. With `joint_pool`, a hit without a logit gets the lowest weighted
            logit of the query.
        parts: values of the parts of the final score, without weights. The keys are part names, see
            `edje_index.scoring.weights.PART_NAMES`. In a search with `joint_pool`, hits that the joint encoder did not
            score have no `logit`, see `edje_index.scoring.cascade`.

    Example:
        >>> from edje_index import TokenIndex
        >>> hit = TokenIndex.open("photos.edje").search("a dog", k=1, pool=4)[0]
        >>> sorted(hit.parts), hit.score == hit.joint_score == hit.parts["logit"]
        (['logit'], True)
    """

    row_id: int
    uri: str
    score: float
    embedding_score: float
    joint_score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


class Hits(list[Hit]):
    """A list of the hits of one query, best first. A notebook shows the list as a table with images.

    Args:
        hits: the hits of the query, best first.
        root: directory of the searched index.
        stages: duration of each stage of the search in seconds. The keys are names in `stages.STAGES`. If one call
            searches several queries, the durations are for the whole call.

    Example:
        >>> from edje_index import TokenIndex
        >>> hits = TokenIndex.open("photos.edje").search("a dog", k=2)
        >>> hits._repr_html_().count("data:image/jpeg")
        2
    """

    def __init__(self, hits: Iterable[Hit], root: Path, stages: Mapping[str, float] | None = None) -> None:
        super().__init__(hits)
        self.root = root
        self.stages = dict(stages or {})

    def first(self, k: int) -> Hits:
        """Return the first `k` hits."""
        return Hits(self[:k], self.root, self.stages)

    def _repr_html_(self) -> str:
        from jinja2 import Template

        shown = self[:_SHOWN]
        template = Template(_TEMPLATE, autoescape=True)
        return str(template.render(hits=shown, images=self._images(shown), more=len(self) - len(shown)))

    def _images(self, hits: list[Hit]) -> dict[int, str]:
        """Return data URIs of thumbnails by row id. Images that cannot be read are left out."""
        from edje_index.images.thumbnails import read_thumbnails

        try:
            thumbnails = read_thumbnails(self.root, [hit.row_id for hit in hits], _SIDE)
        except EdjeError:  # the index has been moved or removed since
            return {}
        return {thumbnail.row_id: thumbnail.data_uri for thumbnail in thumbnails if thumbnail.data_uri is not None}


def best_hits(index: CommittedIndex, candidates: Candidates, scores: CandidateScores, k: int) -> Hits:
    """Return the `k` candidates with the highest final scores, best first.

    Candidates with equal scores are sorted by row id.
    """
    order = np.lexsort((candidates.rows, -scores.final))[:k]
    uris = read_index_rows(index, candidates.rows[order], ["uri"])["uri"].to_pylist()
    hits = (
        Hit(
            row_id=int(candidates.rows[position]),
            uri=uri,
            score=float(scores.final[position]),
            embedding_score=float(candidates.similarities[position]),
            joint_score=None if scores.joint is None else float(scores.joint[position]),
            parts={
                part: float(values[position]) for part, values in scores.parts.items() if not np.isnan(values[position])
            },
        )
        for position, uri in zip(order, uris, strict=True)
    )
    return Hits(hits, index.root)
