"""Searches an index with algorithm 2 of the EDJE paper.

A search embeds the text, finds the nearest rows, reads the tokens of these rows, computes the final scores, and sorts.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edje_index.indexing.faiss_index import AnnIndex
from edje_index.scoring.parts import Pairs
from edje_index.scoring.weights import BUNDLE_SCORE, ScoreWeights
from edje_index.search.hits import Hits, best_hits
from edje_index.search.query_arguments import hit_counts, query_text, query_texts
from edje_index.search.requested_rows import requested_rows
from edje_index.search.reranking import Candidates, CandidateScores, Reranker, embedding_scores
from edje_index.search.row_filters import RowFilters
from edje_index.search.search_model import ModelOptions, SearchModel
from edje_index.search.search_options import SearchOptions
from edje_index.search.stages import FETCH, HITS, NEAREST, TEXT_TOWER, VISION_TOWER, Stages
from storage_formats.arguments import as_count, as_flag, as_list
from storage_formats.codecs import Blocks
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.mirror import open_index
from storage_formats.format.object_store import IndexLocation
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from PIL import Image

    from edje_index.search.image_to_text import TextHit


_PAIRS_AT_ONCE = 1024
"""Number of pairs whose tokens are in memory at the same time.

The tokens take 50 MB for blocks of 64 x 384. The number suffices to form batches of equal text lengths.
"""


class TokenIndex:
    """An open index and the model bundle that built it.

    Example:
        >>> from edje_index import TokenIndex
        >>> index = TokenIndex.open("photos.edje")
        >>> hits = index.search("two dogs play in the snow", k=3)
        >>> len(hits), hits[0].score >= hits[2].score
        (3, True)
    """

    def __init__(
        self,
        index: CommittedIndex,
        model: SearchModel,
        *,
        precision: str,
        score: str | ScoreWeights = BUNDLE_SCORE,
    ) -> None:
        self.committed = index
        self.model = model
        self.filters = RowFilters(index)
        self._ann = AnnIndex(index)
        self._store = TokenStore(index, precision)
        self._score = score
        self._refreshing = threading.Lock()

    @property
    def root(self) -> Path:
        """Absolute path of the index, or of the local cache of an index on an object store."""
        return self.committed.root

    @property
    def manifest(self) -> Manifest:
        """Manifest of the open snapshot."""
        return self.committed.manifest

    @property
    def precision(self) -> str:
        """Precision of the tokens that re-ranking reads."""
        return self._store.precision

    def with_precision(self, precision: str) -> TokenIndex:
        """Return a copy of this object that re-ranks with tokens of `precision`. The copy shares the model.

        Raises:
            UsageError: the index has no tokens of `precision`.
        """
        other = copy.copy(self)
        other._store = TokenStore(self.committed, precision)
        return other

    @classmethod
    @name_missing_extra("search")
    def open(
        cls,
        root: IndexLocation,
        model: str | Path | None = None,
        *,
        precision: str | None = None,
        snapshot: int | None = None,
        score: str | ScoreWeights = BUNDLE_SCORE,
        **options: Unpack[ModelOptions],
    ) -> TokenIndex:
        """Open the index at `root`.

        Args:
            root: directory of the index, or its URL on an object store.
            model: directory of the model bundle; None selects the bundle that built the index.
            precision: precision of the tokens that re-ranking reads; None selects the first precision of the index.
            snapshot: number of the snapshot to open; None selects the current snapshot. If the index changes later,
                searches use the opened snapshot until `refresh` is called.
            score: final score to sort by: "bundle" (the weights of the bundle), "logit", "embedding",
                "PART=WEIGHT,..." or `ScoreWeights`. See `edje_index.scoring.weights.parse_score`.
            options: device and data type of the model. See `ModelOptions`.

        Raises:
            UsageError: there is no index at `root`, the index does not contain `snapshot` or `precision`, or `score` is
                invalid.
            ModelError: the bundle is missing, did not build this index, or has no model for a part of `score`.
            ObjectStoreError: the object store refused a request or cannot be reached. Searches raise it too.
        """
        index = open_index(root, snapshot)
        bundle = SearchModel.of_index(index, model, **options)
        bundle.weights("t2i", score)  # raises an error if the bundle cannot compute the score
        chosen = index.manifest.spec.precisions[0] if precision is None else precision
        return cls(index, bundle, precision=chosen, score=score)

    def refresh(self) -> int:
        """Switch to the current snapshot of the index. Return the number of the snapshot.

        Do not call this method while another thread searches. Calls in several threads wait for each other.

        Raises:
            UsageError: the index was built again with another model.
            CorruptIndexError: a file of the index is damaged.

        Example:
            >>> from pipelines import delete_rows
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> _ = delete_rows("photos.edje", rows=[5])
            >>> index.refresh(), 5 in [hit.row_id for hit in index.search("a dog")]
            (1, False)
        """
        with self._refreshing:  # else a slower call could put an older snapshot in place of a newer one
            vars(self).update(vars(self.at_current_snapshot()), _refreshing=self._refreshing)
            return self.manifest.snapshot.number

    def at_current_snapshot(self) -> TokenIndex:
        """Return this object, or a new object if the index has changed. The new object shares the model.

        If the index no longer contains the precision of this object, the new object uses the first precision of the
        index.

        Raises:
            UsageError, CorruptIndexError: as for `refresh`.
        """
        index = open_index(self.committed.location)
        if index.manifest == self.manifest:
            return self
        if index.manifest.model.get("fingerprint") != self.manifest.model.get("fingerprint"):
            raise UsageError(f"{self.committed.location} was built again with another model; open the index again")
        held = index.manifest.spec.precisions
        precision = self.precision if self.precision in held else held[0]
        return TokenIndex(index, self.model, precision=precision, score=self._score)

    @overload
    def search(self, text: str, k: int = ..., pool: int = ..., **options: Unpack[SearchOptions]) -> Hits: ...

    @overload
    def search(
        self, text: list[str] | tuple[str, ...], k: int = ..., pool: int = ..., **options: Unpack[SearchOptions]
    ) -> list[Hits]: ...

    def search(
        self,
        text: str | list[str] | tuple[str, ...],
        k: int = 10,
        pool: int = 100,
        **options: Unpack[SearchOptions],
    ) -> Hits | list[Hits]:
        """Return the `k` best images for `text`, best first. Images with equal scores are sorted by row id.

        One call with several texts is faster than one call per text, because the texts share batches. Sharing a batch
        changes a score by at most 1e-4 in float32.

        Args:
            text: one query, or a list or tuple of queries.
            k: number of hits per query.
            pool: number of candidates to re-rank per query; at least `k`. The candidates are the rows with the nearest
                embeddings.
            options: `rerank`, `score`, `where` and `joint_pool`, see `SearchOptions`.

        Returns:
            The hits of the query; for several queries, one list of hits per query. `Hits.stages` contains the durations
            of the stages.

        Raises:
            UsageError: a query is empty, `k` or `pool` is out of range, or `score`, `where` or `joint_pool` is invalid.
            ModelError: the bundle has no model for a part of `score`, or `score` needs adapter tokens but the index
                stores patch features.

        Example:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje", score="logit=1,embedding=20")
            >>> ["logit" in hit.parts for hit in index.search("a dog", k=3, pool=6, joint_pool=2)]
            [True, True, False]
        """
        if isinstance(text, str):
            return self._search_each([query_text(text)], k, pool, **options)[0]
        return self._search_each(query_texts(text), k, pool, **options)

    def _search_each(
        self,
        texts: list[str],
        k: int,
        pool: int,
        *,
        rerank: bool = True,
        score: str | ScoreWeights | None = None,
        where: str | None = None,
        joint_pool: int | None = None,
    ) -> list[Hits]:
        """Return the hits of each text, see `search`."""
        k, pool = hit_counts(k, pool)
        if not as_flag(rerank, "rerank"):
            _check_unused(score=score, joint_pool=joint_pool)
        stages = Stages()
        reranker = self._reranker(score, stages, joint_pool) if rerank else None
        if not texts:
            return []
        passing = self._passing(where)
        with stages.timed(TEXT_TOWER):
            embeddings = self.model.text.encode(texts)
        with stages.timed(NEAREST):
            neighbours = self._ann.nearest_to_each(embeddings, pool if reranker else k, passing)
            nearest = [Candidates(*pair) for pair in neighbours]
        if reranker is None:
            return self._plain_hits(nearest, k, stages)
        return self._reranked_hits(reranker, texts, nearest, k)

    def rerank(self, text: str, rows: Sequence[int | str], *, score: str | ScoreWeights | None = None) -> Hits:
        """Score `rows` for `text`. Return one hit per entry of `rows`, best first.

        Args:
            text: the query.
            rows: row ids or uris of images. Looking up a uri scans the rows table.
            score: final score to sort by, see `open`; None selects the score that was given to `open`.

        Raises:
            UsageError: the query is empty, a row id or uri is unknown, a row has no tokens, or `score` is invalid.
            CorruptIndexError: the tokens of a row are damaged.
            ModelError: as for `search`.

        Example:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> sorted(hit.row_id for hit in index.rerank("a dog", [4, 0, 2]))
            [0, 2, 4]
        """
        return self.rerank_each([text], [rows], score=score)[0]

    def rerank_each(
        self, texts: Sequence[str], rows: Sequence[Sequence[int | str]], *, score: str | ScoreWeights | None = None
    ) -> list[Hits]:
        """Score `rows[i]` for `texts[i]`, for each i. Return one list of hits per text.

        This method is faster than calling `rerank` for each text, because the texts share batches.

        Args:
            texts: the queries.
            rows: one sequence of row ids or uris per text.
            score: final score to sort by, as for `rerank`.

        Raises:
            UsageError, CorruptIndexError, ModelError: as for `rerank`.
        """
        texts, rows = query_texts(texts), as_list(rows, "rows", "sequences of row ids and uris")
        if len(texts) != len(rows):
            raise UsageError(f"got {len(texts)} texts and {len(rows)} sequences of rows: give one per text")
        row_ids = [requested_rows(self.committed, its_rows) for its_rows in rows]
        stages = Stages()
        reranker = self._reranker(score, stages)
        every_row = np.concatenate([np.empty(0, np.int64), *row_ids])
        if not len(every_row):
            return [Hits([], self.root) for _ in texts]
        with stages.timed(TEXT_TOWER):
            embeddings = self.model.text.encode(texts)
        candidates = [self._candidates(*pair) for pair in zip(embeddings, row_ids, strict=True)]
        with stages.timed(FETCH):
            blocks = self._store.fetch(every_row) if reranker.reads_tokens else None
        scores = reranker.scores(texts, candidates, blocks)
        return self._hits(candidates, scores, len(every_row), stages)

    def score_images(
        self, text: str, images: Sequence[bytes | Image.Image], *, score: str | ScoreWeights | None = None
    ) -> list[float]:
        """Encode `images`, and return the final score of each image for `text`. The images need not be in the index.

        The scores can be compared with the scores of rows.

        Args:
            text: the query.
            images: bytes of image files, or PIL images.
            score: final score to compute, see `open`; None selects the score that was given to `open`.

        Raises:
            UsageError: the query is empty, an image cannot be read, or `score` is invalid.
            ModelError: as for `search`.
        """
        text, images = query_text(text), as_list(images, "images", "images")
        reranker = self._reranker(score)
        if not images:
            return []
        from edje_index.search.query_image import encode_images

        tokens, embeddings = encode_images(self.model.image_encoder, images)
        similarities = embeddings @ self.model.text.encode([text])[0]
        pairs = Pairs([text] * len(images), tokens, similarities, embeddings)
        return [float(value) for value in reranker.score_new(pairs)]

    def search_image(self, image: str | Path | bytes | Image.Image, k: int = 10, *, where: str | None = None) -> Hits:
        """Return the `k` images of the index with the embeddings most similar to the embedding of `image`, best first.

        Args:
            image: path of an image file, bytes of an image file, or a PIL image.
            k: number of hits.
            where: filter, as for `search`.

        Raises:
            UsageError: the image cannot be read, `k` is out of range, or `where` is invalid.

        Example:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> index.search_image(index.search("a dog", k=1)[0].uri, k=1)[0].embedding_score > 0.999
            True
        """
        k = as_count(k, "k")
        from edje_index.search.query_image import encode_images

        stages, passing = Stages(), self._passing(where)
        with stages.timed(VISION_TOWER):
            _, embeddings = encode_images(self.model.image_encoder, [image])
        with stages.timed(NEAREST):
            nearest = Candidates(*self._ann.nearest(embeddings[0], k, passing))
        return self._plain_hits([nearest], k, stages)[0]

    def search_row(self, row_id: int, k: int = 10, *, where: str | None = None) -> Hits:
        """Return the `k` images with the embeddings most similar to the embedding of row `row_id`, best first.

        The row `row_id` is not among the hits. `where` is a filter, as for `search`.

        Raises:
            UsageError: the row id is out of range, the row has no tokens, `k` is out of range, or `where` is invalid.

        Example:
            >>> from edje_index import TokenIndex
            >>> 2 in [hit.row_id for hit in TokenIndex.open("photos.edje").search_row(2, k=3)]
            False
        """
        k, stages = as_count(k, "k"), Stages()
        row = requested_rows(self.committed, [row_id])
        embedding = read_embeddings(self.committed, row)[0]
        with stages.timed(NEAREST):
            rows, similarities = self._ann.nearest(embedding, k + 1, self._passing(where))
        other = rows != row
        return self._plain_hits([Candidates(rows[other], similarities[other])], k, stages)[0]

    def search_texts(
        self,
        image: int | str | Path | bytes | Image.Image,
        texts: Sequence[str],
        k: int = 10,
        pool: int = 100,
        *,
        score: str | ScoreWeights | None = None,
    ) -> list[TextHit]:
        """Return the `k` texts that best describe `image`, best first: image-to-text search.

        Args:
            image: row id of the image, or path of an image file, bytes of an image file, or a PIL image. The tokens of
                a row are read from the index. Other images are encoded.
            texts: texts to choose from.
            k: number of hits.
            pool: number of texts to re-rank; at least `k`. These are the texts with the nearest embeddings.
            score: final score to sort by, see `open`; None selects the score that was given to `open`.

        Raises:
            UsageError: `texts` is empty or contains a blank text, `k` or `pool` is out of range, `score` is invalid,
                the row has no tokens, or the image cannot be read.
            ModelError: as for `search`.

        Example:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> len(index.search_texts("photos/3.jpg", ["a dog", "a canoe", "two cats"], k=2))
            2
        """
        from edje_index.search.image_to_text import search_texts

        chosen = self._score if score is None else score
        return search_texts(self, image, texts, k=k, pool=pool, score=chosen)

    def fetch_blocks(self, row_ids: Sequence[int]) -> Blocks:
        """Return the token blocks of `row_ids`, bfloat16 [k, m, d]. See `TokenStore.fetch`."""
        return self._store.fetch(row_ids)

    def _passing(self, where: str | None) -> NDArray[np.bool_] | None:
        return None if where is None else self.filters.passing(where)

    def _reranker(
        self, score: str | ScoreWeights | None, stages: Stages | None = None, joint_pool: int | None = None
    ) -> Reranker:
        chosen = self._score if score is None else score
        return Reranker(self.committed, self.model, score=chosen, stages=stages, joint_pool=joint_pool)

    def _candidates(self, query: NDArray[np.float32], row_ids: NDArray[np.int64]) -> Candidates:
        """Return `row_ids` as candidates, each with the similarity of its embedding to `query`."""
        return Candidates(row_ids, read_embeddings(self.committed, row_ids) @ query)

    def _plain_hits(self, nearest: Sequence[Candidates], k: int, stages: Stages) -> list[Hits]:
        return self._hits(nearest, [embedding_scores(candidates) for candidates in nearest], k, stages)

    def _reranked_hits(
        self, reranker: Reranker, texts: Sequence[str], nearest: Sequence[Candidates], k: int
    ) -> list[Hits]:
        sound: list[Candidates] = []
        scores: list[CandidateScores] = []
        queries_at_once = max(1, _PAIRS_AT_ONCE // max(1, *(len(each.rows) for each in nearest)))
        for start in range(0, len(texts), queries_at_once):
            candidates, blocks = nearest[start : start + queries_at_once], None
            if reranker.reads_tokens:
                with reranker.stages.timed(FETCH):
                    candidates, blocks = self._fetch_sound(candidates)
            scores += reranker.scores(texts[start : start + queries_at_once], candidates, blocks)
            sound += candidates
        return self._hits(sound, scores, k, reranker.stages)

    def _hits(
        self, candidates: Sequence[Candidates], scores: Sequence[CandidateScores], k: int, stages: Stages
    ) -> list[Hits]:
        """Return the `k` best hits of each query, with the durations of the stages."""
        with stages.timed(HITS):
            pairs = zip(candidates, scores, strict=True)
            hits = [best_hits(self.committed, each, its_scores, k) for each, its_scores in pairs]
        seconds = stages.seconds()
        return [Hits(each, each.root, seconds) for each in hits]

    def _fetch_sound(self, candidates: Sequence[Candidates]) -> tuple[list[Candidates], Blocks]:
        """Fetch the blocks of the candidates. Leave out candidates with damaged blocks, and warn about them."""
        sound = list(candidates)
        while True:
            try:
                return sound, self._store.fetch(np.concatenate([each.rows for each in sound]))
            except CorruptIndexError as error:
                if not error.row_ids:
                    raise
                warnings.warn(f"candidates are left out of the search: {error}", RuntimeWarning, stacklevel=5)
                sound = [each.without(error.row_ids) for each in sound]


def _check_unused(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{name} has no effect without re-ranking: leave out {name}, or set rerank to True", parameter=name
            )
