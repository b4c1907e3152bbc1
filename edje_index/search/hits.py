"""Defines the results of a search: its hits, and the durations of its stages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edje_index.scoring.weights import PART_NAMES
from storage_formats.arguments import as_count, as_number, as_path
from storage_formats.errors import EdjeError, UsageError
from storage_formats.format.source_columns import CAPTION_COLUMNS, stored_name
from storage_formats.remote.urls import IndexLocation

if TYPE_CHECKING:
    import pyarrow as pa

# Largest number of hits that `print` or a notebook shows. The file of a notebook
# contains the image of each shown hit, so more hits would make the file large.
_SHOWN = 50
# longer side of a shown image, in pixels
_SIDE = 160
_TEMPLATE = Path(__file__).with_name("hits.html")
_NUMBERS = ("score", "embedding_score", "relevance", "joint_score")
_NAMES_OF_HIT = (*_NUMBERS, *(f"part_{part}" for part in PART_NAMES))


@dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        row_id: row id of the image.
        uri: path or URI of the image.
        score: final score, by which hits are sorted. For the score "embedding", and in
            a search for similar images, it equals `embedding_score`. In a
            late-interaction search, it is the MaxSim of the query and the tokens.
        embedding_score: cosine similarity of the embeddings of the query and the image;
            NaN in a late-interaction search that gets no embedding of the query.
        relevance: a number between 0 and 1. A hit with a higher score never has a lower
            relevance, see `edje_index.scoring.weights.relevance`. None in a
            late-interaction search and in a search for similar images.
        joint_score: weighted sum of the parts logit, late interaction and pooled
            similarity. None if the final score has none of these parts.
        parts: values of the parts of the final score, without weights. The keys are
            part names, see `edje_index.scoring.weights.PART_NAMES`.
        columns: values from the rows table, by column name. The columns are those that
            the caller chose, or by default those with captions.

    Examples:
        >>> from edje_index import TokenIndex
        >>> hit = TokenIndex.open("photos.edje").search("a dog", k=1, pool=4)[0]
        >>> sorted(hit.parts), hit.score == hit.joint_score == hit.parts["logit"]
        (['logit'], True)
    """

    row_id: int
    uri: str
    score: float
    embedding_score: float
    relevance: float | None = None
    joint_score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """Return `row_id`, `uri`, `relevance`, `score` and the values of the columns,
        by name.

        `Hits.to_arrow` has some columns with names of its own, for example `score` and
        `part_logit`. If a column of the rows table has one of these names, it gets the
        prefix "source_" here.
        """
        columns = {
            stored_name(name, _NAMES_OF_HIT): value
            for name, value in self.columns.items()
        }
        return {
            "row_id": self.row_id,
            "uri": self.uri,
            "relevance": self.relevance,
            "score": self.score,
            **columns,
        }

    def described(self, *, every_caption: bool = False) -> str:
        """Return the values of the columns as one line of text. Columns without a value
        are left out.

        If the image has several captions, the line has only the first caption and the
        number of the others, such as "+4". With `every_caption`, it has all captions.
        """
        values = {}
        for name, value in self.columns.items():
            if value is None:
                continue
            is_cut = (
                isinstance(value, list) and name in CAPTION_COLUMNS and len(value) > 1
            )
            if is_cut and not every_caption:
                value = [f"{value[0]}  +{len(value) - 1}"]
            values[name] = "; ".join(value) if isinstance(value, list) else str(value)
        return " | ".join(
            value if name in CAPTION_COLUMNS else f"{name}: {value}"
            for name, value in values.items()
        )


@dataclass(frozen=True)
class TextHit:
    """One result of an image-to-text search.

    Attributes:
        position: position of the text among the texts to choose from.
        text: the text.
        score: final score, by which hits are sorted.
        embedding_score: cosine similarity of the embeddings of the image and the text.
        relevance: a number between 0 and 1, as for `Hit`. A hit with a higher score
            never has a lower relevance.
        parts: values of the parts of the final score, without weights, by part name.

    Examples:
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
    relevance: float
    parts: Mapping[str, float]


class Hits(list[Hit]):
    """A list of the hits of one query, best first. `print` shows a table of the first
    50 hits, and a notebook shows a table of these hits with their images.

    Args:
        hits: the hits of the query, best first.
        root: directory or URL of the searched index.
        stages: duration of each stage of the search in seconds, see `Stages`. If one
            call searches several queries, the durations are for the whole call.
        damaged: row ids of the candidates that were left out, because their tokens are
            damaged.

    Examples:
        >>> from edje_index import TokenIndex
        >>> hits = TokenIndex.open("photos.edje").search("a dog", k=2)
        >>> hits._repr_html_().count("data:image/jpeg")
        2
        >>> hits.to_arrow().column_names[:5]
        ['row_id', 'uri', 'score', 'embedding_score', 'relevance']
    """

    def __init__(
        self,
        hits: Iterable[Hit],
        root: IndexLocation,
        stages: Mapping[str, float] | None = None,
        damaged: Sequence[int] = (),
    ) -> None:
        super().__init__(hits)
        self.root = root
        self.stages = dict(stages or {})
        self.damaged = damaged

    def first(self, k: int) -> Hits:
        """Return the first `k` hits."""
        best = self[: as_count(k, "k", least=0)]
        return Hits(best, self.root, self.stages, self.damaged)

    def at_least(self, min_relevance: float) -> Hits:
        """Return the hits whose relevance is at least `min_relevance`. A hit without a
        relevance counts as having relevance 0.
        """
        least = as_number(min_relevance, "min_relevance", most=1.0)
        kept = [hit for hit in self if (hit.relevance or 0.0) >= least]
        return Hits(kept, self.root, self.stages, self.damaged)

    def to_arrow(self) -> pa.Table:
        """Return a pyarrow table with one row per hit.

        The first columns are `row_id`, `uri`, `score`, `embedding_score`, `relevance`
        and `joint_score`. If there are no hits, the table has only these columns. The
        columns ``part_NAME`` follow, one for each part of the final score. The last
        columns are the `columns` of the hits, under the names that `Hit.metadata` gives
        them.
        """
        import pyarrow as pa

        schema = pa.schema(
            [
                ("row_id", pa.int64()),
                ("uri", pa.string()),
                *((name, pa.float64()) for name in _NUMBERS),
            ]
        )
        rows: list[dict[str, Any]] = []
        for hit in self:
            parts = {f"part_{part}": value for part, value in hit.parts.items()}
            numbers = {name: getattr(hit, name) for name in _NUMBERS}
            rows.append({**parts, **numbers, **hit.metadata()})
        others = pa.Table.from_pylist(rows).schema
        return pa.Table.from_pylist(
            rows, pa.unify_schemas([schema, others], promote_options="permissive")
        )

    def save(self, path: str | Path) -> None:
        """Write the table of `to_arrow` to a file, as Parquet if its name ends in
        .parquet, otherwise as CSV; see `table_bytes`.
        """
        file = as_path(path, "path")
        file.write_bytes(table_bytes(self.to_arrow(), file.suffix))

    def to_pandas(self) -> Any:
        """Return a pandas data frame with the columns of `to_arrow`.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            return self.to_arrow().to_pandas()
        except ModuleNotFoundError as error:
            raise UsageError(
                "this needs the package pandas, which is not installed; run: pip"
                " install pandas, or call to_arrow"
            ) from error

    def __repr__(self) -> str:
        rated = [
            (hit.score if hit.relevance is None else hit.relevance, hit)
            for hit in self[:_SHOWN]
        ]
        lines = [
            f"{rank:>4} {value:9.3f} {hit.row_id:>9}  {hit.uri}  {hit.described()}"
            for rank, (value, hit) in enumerate(rated, 1)
        ]
        more = [f"and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        lines = [f"{len(self)} hits in {self.root}", *map(str.rstrip, lines), *more]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from jinja2 import Template

        from edje_index.inputs.thumbnails import read_thumbnails

        hits = self[:_SHOWN]
        images = {}
        problem = ""
        try:
            thumbnails = read_thumbnails(self.root, [hit.row_id for hit in hits], _SIDE)
            images = {thumbnail.row_id: thumbnail.data_uri for thumbnail in thumbnails}
        except EdjeError as error:
            # The index may have been moved or removed after the search.
            problem = f"The images cannot be read: {error}"
        template = Template(_TEMPLATE.read_text(), autoescape=True)
        return str(
            template.render(
                hits=hits, images=images, more=len(self) - len(hits), problem=problem
            )
        )


def table_bytes(table: pa.Table, suffix: str) -> bytes:
    """Return `table` as a Parquet file if `suffix` is ".parquet", otherwise as CSV.

    Spreadsheets open the CSV: it begins with a byte order mark, and the texts of a list
    are joined with "; ".
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    sink = pa.BufferOutputStream()
    if suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, sink)
        return bytes(sink.getvalue())
    import pyarrow.csv as pa_csv

    for position, column in enumerate(table.schema):
        if pa.types.is_list(column.type):
            texts = table[position].cast(pa.list_(pa.string()))
            joined = pc.binary_join(texts, "; ")
            table = table.set_column(position, column.name, joined)
    sink.write("\ufeff".encode())
    pa_csv.write_csv(table, sink)
    return bytes(sink.getvalue())


class Stages(dict[str, float]):
    """Duration of each stage of a search in seconds, by name. A stage that did not run
    has no entry.

    The names are:

    - `text_tower`, `vision_tower`: embeds the query. The first search of a `TokenIndex`
      also reads the weights of the tower in this stage.
    - `nearest`: finds the candidates.
    - `fetch`: reads and decodes tokens.
    - `other_parts`: computes late interaction and pooled similarity.
    - `joint_encoder`: computes the logits.
    - `hits`: sorts the candidates, and looks up uris and columns.
    - `total`: the time from the start of the search to the end of the last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._started = time.perf_counter()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the duration of the `with` block to `stage`, and update `total`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self[stage] = self.get(stage, 0.0) + ended - started
            self.pop("total", None)
            self["total"] = ended - self._started


class RankedHit(NamedTuple):
    """A hit, its rank by the final score, and its rank by embedding similarity. The
    best rank is 1.
    """

    hit: Hit
    rank: int
    embedding_rank: int


def rank_hits(hits: Sequence[Hit]) -> list[RankedHit]:
    """Return each hit with its two ranks. Of two hits with the same embedding
    similarity, the hit with the lower row id has the better embedding rank.

    Args:
        hits: all candidates of a search, best final score first.
    """
    by_embedding = sorted(hits, key=lambda hit: (-hit.embedding_score, hit.row_id))
    embedding_ranks = {hit.row_id: rank for rank, hit in enumerate(by_embedding, 1)}
    return [
        RankedHit(hit, rank, embedding_ranks[hit.row_id])
        for rank, hit in enumerate(hits, 1)
    ]
