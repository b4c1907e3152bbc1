"""Searches an index with algorithm 2 of the EDJE paper.

A search embeds the text, finds the nearest rows, reads the tokens of these rows,
computes the final scores, and sorts.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch

from edje_index.bundles.info import matching_bundle
from edje_index.fetching.device_fetcher import DeviceFetcher
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.models.devices import as_tensor
from edje_index.scoring.parts import ImageCache, Images, reads_tokens
from edje_index.scoring.weights import (
    BUNDLE_SCORE,
    EMBEDDING,
    IMAGE_TO_TEXT,
    TEXT_TO_IMAGE,
    ScoreWeights,
    relevance,
)
from edje_index.search.hits import Hit, Hits, Stages, TextHit
from edje_index.search.query import encode_images, requested_rows
from edje_index.search.rows import IndexRows
from edje_index.search.search_model import Scores, SearchModel
from storage_formats.arguments import (
    as_count,
    as_list,
    as_number,
    as_path,
    as_text,
    refuse_pickle,
    repr_of,
    shown,
)
from storage_formats.arrays import Floats, Ints
from storage_formats.codecs import BF16, Blocks
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.remote.urls import IndexLocation
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from PIL import Image

ImageQuery: TypeAlias = "int | str | Path | bytes | Image.Image"
Candidates = tuple[Ints, Floats]
"""The candidates of one query: their row ids, int64 [k], and the cosine similarities of
their embeddings to the embedding of the query, float32 [k].
"""

_DEFAULT_POOL = 100
_PAIRS_AT_ONCE = 1024
"""Largest number of pairs of a text and an image whose tokens are in memory at the same
time, unless the pool of one query is larger.

The tokens take 50 MB for blocks of 64 x 384. On a CPU, the texts of a batch have the
same length. If fewer pairs were in memory, more batches would be only partly filled.
"""


class TokenIndex:
    """An open index and the model bundle that built it.

    Searches raise these errors:

    - `UsageError` or `RowIdError` for a wrong argument, for example an empty text or an
      unknown row.
    - `ModelError` if the bundle has no model for a part of the score, or if the score
      needs adapter tokens but the index stores patch features.
    - `CorruptIndexError` if a file of the index is damaged.

    Examples:
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
        precision: str | None = None,
        score: str | ScoreWeights = BUNDLE_SCORE,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.score = score
        self._columns = columns
        self._refreshing = threading.Lock()
        self._fetching = threading.Lock()
        self.committed = index
        self.rows = IndexRows(index, columns)
        self._ann = AnnIndex(index)
        self.store = TokenStore(index, precision)
        self._stores = {self.store.precision: self.store}
        self._image_caches: dict[str, ImageCache] = {}
        self._fetchers: dict[str, DeviceFetcher] = {}

    __repr__ = repr_of("store", "model.info.path")
    __reduce__ = refuse_pickle("open the index there with TokenIndex.open")

    @property
    def root(self) -> IndexLocation:
        """Absolute path or URL of the index."""
        return self.committed.location

    @property
    def manifest(self) -> Manifest:
        """Manifest of the open snapshot."""
        return self.committed.manifest

    @property
    def precision(self) -> str:
        """Precision of the tokens that re-ranking reads."""
        return self.store.precision

    def with_precision(self, precision: str) -> TokenIndex:
        """Return a copy of this object that re-ranks with tokens of `precision`. The
        copy shares the model.

        Later copies with the same precision share one open `TokenStore`. Several
        threads may call this method.

        Raises:
            UsageError: the index has no tokens of `precision`.
        """
        # `copy.copy` would call `__reduce__`, which raises an error.
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        if as_text(precision, "precision") not in self._stores:
            self._stores[precision] = TokenStore(self.committed, precision)
        other.store = self._stores[precision]
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
        columns: Sequence[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> TokenIndex:
        """Open the index at `root`.

        Args:
            root: directory of the index, or its URL on an object store.
            model: directory of the model bundle; None selects the bundle that built the
                index.
            precision: precision of the tokens that re-ranking reads; None selects the
                stored precision of the highest fidelity.
            snapshot: number of the snapshot to open; None selects the current snapshot.
                If the index changes later, searches use the opened snapshot until
                `refresh` is called.
            score: final score to sort by: "bundle" (the weights of the bundle),
                "logit", "embedding", "PART=WEIGHT,..." or `ScoreWeights`. See
                `edje_index.scoring.weights.parse_score`.
            columns: names of the columns of the rows table whose values are in
                `Hit.columns`; None selects the columns with captions, if there are any.
            device: device of the model: "auto", "cpu", "cuda" or "cuda:N".
            dtype: data type of the joint encoder's matrix products, see `SearchModel`.

        Raises:
            UsageError: there is no index at `root`, the index does not contain
                `snapshot`, `precision` or one of `columns`, or `score` is invalid.
            ModelError: the bundle is missing, did not build this index, or has no model
                for a part of `score`.
            ObjectStoreError: the object store refused a request or cannot be reached.
                Searches raise it too.
        """
        index = CommittedIndex.open(root, snapshot)
        bundle = SearchModel(matching_bundle(index, model), device=device, dtype=dtype)
        # This raises an error if the bundle cannot compute the score.
        bundle.weights("t2i", score)
        return cls(index, bundle, precision=precision, score=score, columns=columns)

    def refresh(self) -> int:
        """Switch to the current snapshot of the index. Return the number of the
        snapshot.

        Do not call this method while another thread searches. Calls in several threads
        wait for each other.

        Raises:
            UsageError: a different index was written at the same location.
            CorruptIndexError: a file of the index is damaged.

        Examples:
            >>> from edje_index import delete_rows
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> _ = delete_rows("photos.edje", rows=[5])
            >>> index.refresh(), 5 in [hit.row_id for hit in index.search("a dog")]
            (1, False)
        """
        # Without the lock, a slower call could replace a newer snapshot with an older
        # one.
        with self._refreshing:
            current = vars(self.at_current_snapshot())
            vars(self).update({**current, "_refreshing": self._refreshing})
            return self.manifest.snapshot.number

    def at_current_snapshot(self) -> TokenIndex:
        """Return this object, or a new object if the index has changed. The new object
        shares the model.

        If the current snapshot lacks the precision of this object, the new object
        uses the stored precision of the highest fidelity.

        Raises:
            UsageError, CorruptIndexError: as for `refresh`.
        """
        index = self.committed.reopen()
        if index.manifest == self.manifest:
            return self
        precision = (
            self.precision if self.precision in index.manifest.spec.precisions else None
        )
        return TokenIndex(
            index,
            self.model,
            precision=precision,
            score=self.score,
            columns=self._columns,
        )

    @property
    def default_pool(self) -> int:
        """Number of candidates that a search re-ranks by default. The bundle may name
        this number; otherwise it is 100.
        """
        return self.model.info.pool or _DEFAULT_POOL

    @overload
    def search(
        self,
        text: str,
        k: int = ...,
        pool: int | None = ...,
        *,
        score: str | ScoreWeights | None = ...,
        where: str | None = ...,
        image: ImageQuery | None = ...,
        min_relevance: float = ...,
    ) -> Hits: ...

    @overload
    def search(
        self,
        text: list[str] | tuple[str, ...],
        k: int = ...,
        pool: int | None = ...,
        *,
        score: str | ScoreWeights | None = ...,
        where: str | None = ...,
        image: ImageQuery | None = ...,
        min_relevance: float = ...,
    ) -> list[Hits]: ...

    def search(
        self,
        text: str | list[str] | tuple[str, ...],
        k: int = 10,
        pool: int | None = None,
        *,
        score: str | ScoreWeights | None = None,
        where: str | None = None,
        image: ImageQuery | None = None,
        min_relevance: float = 0.0,
    ) -> Hits | list[Hits]:
        """Return the `k` best images for `text`, best first. Images with equal scores
        are sorted by row id.

        One call with several texts is faster than one call per text, because the texts
        share batches. Sharing a batch changes a score by at most 1e-4 in float32.

        To save time, the joint encoder does not score every candidate. The bundle names
        the range of its logits, and the joint encoder scores only candidates that can
        be among the `k` best with a logit in this range. It scores all candidates if
        the bundle names no range, or if the score is the logit alone.

        Args:
            text: one query, or a list or tuple of queries.
            k: number of hits per query.
            pool: number of candidates to re-rank per query; at least `k`. None selects
                `default_pool`, or `k` if `k` is larger. The candidates are the rows
                whose embeddings are most similar to the query embedding.
            score: final score to sort by, see `open`; None selects the score that was
                given to `open`. The score "embedding" keeps the order of the embeddings
                and reads no tokens.
            where: filter such as "width > 800 and licence = 'cc0'", see
                `edje_index.search.where`. The candidates are the nearest rows that
                pass the filter. None lets all rows pass.
            image: image or row id, as for `search_image`. Give it to find images that
                match the text and resemble this image. The query embedding is then the
                normalised sum of the embeddings of text and image. The joint encoder
                still reads only the text.
            min_relevance: smallest relevance of a hit, between 0 and 1. Hits with a
                lower relevance are left out, so there may be fewer than `k`.

        Returns:
            The hits of the query. If `text` is a list or tuple, one `Hits` per query.
            `Hits.stages` contains the duration of each stage of the search.

        Examples:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje", score="logit=1,embedding=20")
            >>> [sorted(hit.parts) for hit in index.search("a dog", k=2, pool=6)]
            [['embedding', 'logit'], ['embedding', 'logit']]
        """
        texts = _texts([text] if isinstance(text, str) else text)
        k, pool = _counts(k, pool, self.default_pool)
        min_relevance = as_number(min_relevance, "min_relevance", most=1.0)
        stages = Stages()
        weights = self._weights(score)
        if not texts:
            return []
        passing = None if where is None else self.rows.passing(where)
        with stages.timed("text_tower"):
            embeddings = self.model.text.encode(texts)
        if image is not None:
            embeddings = embeddings + self._encoded([_of_file(image)], stages)[1]
            embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        with stages.timed("nearest"):
            nearest = self._ann.nearest_to_each(embeddings, pool, passing)
        hits = self._ranked(texts, nearest, weights, stages, k)
        if min_relevance:
            hits = [each.at_least(min_relevance) for each in hits]
        return hits[0] if isinstance(text, str) else hits

    def _ranked(
        self,
        texts: list[str],
        candidates: list[Candidates],
        weights: ScoreWeights,
        stages: Stages,
        k: int | None = None,
    ) -> list[Hits]:
        """Score the candidates of each query. Return the `k` best hits of each query,
        best first. Candidates of different queries share batches.

        If `k` is None, all candidates are scored, and are hits. Otherwise, a candidate
        that cannot be a hit may be left out, and one whose tokens are damaged is.
        """
        hits = []
        damaged = []
        pairs = max(len(rows) for rows, _ in candidates)
        queries_at_once = max(1, _PAIRS_AT_ONCE // max(1, pairs))
        for start in range(0, len(texts), queries_at_once):
            part = slice(start, start + queries_at_once)
            # Nothing refers to the tokens of the last iteration any more, so the next
            # tokens can use their memory.
            images = None
            kept = candidates[part]
            if reads_tokens(weights.parts):
                kept, images = self._fetch(kept, stages, skips_damaged=k is not None)
            rows, similarities = map(np.concatenate, zip(*kept, strict=True))
            for its_rows, _ in candidates[part]:
                damaged.append(np.setdiff1d(its_rows, rows).tolist())
            captions: list[str] = []
            pools = []
            for text, (its_rows, _) in zip(texts[part], kept, strict=True):
                pools.append(slice(len(captions), len(captions) + len(its_rows)))
                captions += [text] * len(its_rows)
            scores = self.model.scores(
                weights, captions, similarities, images, stages, pools=pools, k=k
            )
            relevances = relevance(scores.final, weights)
            for pool in pools:
                hits.append(self._hits(rows, scores, relevances, pool, stages, k))
        # Only now the stages are complete.
        return [
            Hits(each, self.root, stages, left_out)
            for each, left_out in zip(hits, damaged, strict=True)
        ]

    def _fetch(
        self, candidates: list[Candidates], stages: Stages, *, skips_damaged: bool
    ) -> tuple[list[Candidates], Images]:
        """Return the candidates and their images, in the same order. If `skips_damaged`
        is True, a candidate whose tokens are damaged is left out, and a warning names
        it.
        """
        rows = np.concatenate([its_rows for its_rows, _ in candidates])
        try:
            return candidates, self._images(rows, stages)
        except CorruptIndexError as error:
            damaged = error.row_ids
            if not damaged or not skips_damaged:
                raise
            warnings.warn(
                f"candidates are left out of the search: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
        kept = []
        for its_rows, similarities in candidates:
            is_sound = ~np.isin(its_rows, damaged)
            kept.append((its_rows[is_sound], similarities[is_sound]))
        return self._fetch(kept, stages, skips_damaged=True)

    def _images(self, rows: Ints, stages: Stages) -> Images:
        """Return the images `rows` [k]. Their tokens are on the device of the joint
        encoder.
        """
        device = self.model.joint.device
        if device.type != "cpu":
            # A `DeviceFetcher` reads records and decodes them on the device. It is not
            # thread-safe, so one thread fetches at a time.
            with stages.timed("fetch"), self._fetching:
                if self.precision not in self._fetchers:
                    fetcher = DeviceFetcher(self.store, str(device))
                    self._fetchers[self.precision] = fetcher
                tokens = self._fetchers[self.precision].fetch(rows)
            # The cache is in the memory of the CPU. A GPU computes pooled vectors and
            # token scales again in less time than it takes to copy them from the cache.
            return self.model.scorer.images(tokens)
        with stages.timed("fetch"):
            tokens = as_tensor(self.store.fetch(rows))
        cache = self._image_caches.get(self.precision)
        if cache is None:
            cache = ImageCache(self.model.scorer, self.store.block_shape[0])
            self._image_caches[self.precision] = cache
        return cache.images(rows, tokens)

    def _weights(
        self, score: str | ScoreWeights | None, direction: str = TEXT_TO_IMAGE
    ) -> ScoreWeights:
        """Return the weights that `score` describes. None selects the score of this
        object. Raise ModelError if the bundle cannot compute the final score.
        """
        weights = self.model.weights(direction, self.score if score is None else score)
        if reads_tokens(weights.parts):
            self.model.check_reranks()
        return weights

    def _hits(
        self,
        rows: Ints,
        scores: Scores,
        relevances: Floats | None,
        pool: slice,
        stages: Stages,
        k: int | None,
    ) -> list[Hit]:
        """Return the `k` best hits among the candidates of one query, which are at the
        positions `pool` of `rows` and `scores`. Hits with equal scores are sorted by
        row id.
        """
        with stages.timed("hits"):
            # Sort by descending score, with NaN last. The last key of `lexsort` decides
            # first.
            order = pool.start + np.lexsort((rows[pool], -scores.final[pool]))[:k]
            return [
                Hit(
                    row_id=int(rows[at]),
                    uri=uri,
                    score=float(scores.final[at]),
                    embedding_score=float(scores.similarities[at]),
                    relevance=None if relevances is None else float(relevances[at]),
                    joint_score=(
                        None if scores.joint is None else float(scores.joint[at])
                    ),
                    parts={name: float(of[at]) for name, of in scores.parts.items()},
                    columns=columns,
                )
                for at, (uri, columns) in zip(
                    order.tolist(), self.rows.described(rows[order]), strict=True
                )
            ]

    def rerank(
        self,
        text: str,
        rows: Sequence[int | str],
        *,
        score: str | ScoreWeights | None = None,
    ) -> Hits:
        """Score `rows` for `text`. Return one hit per entry of `rows`, best first.

        Args:
            text: the query.
            rows: row ids or uris of images. To find a uri, the rows table is scanned,
                which takes long for a large index.
            score: final score to sort by, see `open`; None selects the score that was
                given to `open`.

        Examples:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> sorted(hit.row_id for hit in index.rerank("a dog", [4, 0, 2]))
            [0, 2, 4]
        """
        return self.rerank_each([text], [rows], score=score)[0]

    def rerank_each(
        self,
        texts: Sequence[str],
        rows: Sequence[Sequence[int | str]],
        *,
        score: str | ScoreWeights | None = None,
    ) -> list[Hits]:
        """Score `rows[i]` for `texts[i]`, for each i. Return one list of hits per text.

        This method is faster than calling `rerank` for each text, because the texts
        share batches.

        Args:
            texts: the queries.
            rows: one sequence of row ids or uris per text.
            score: final score to sort by, as for `rerank`.
        """
        texts = _texts(texts)
        rows = as_list(rows, "rows", "sequences of row ids and uris")
        if len(texts) != len(rows):
            raise UsageError(
                f"got {len(texts)} texts and {len(rows)} sequences of rows: give one"
                " per text"
            )
        row_ids = [requested_rows(self.committed, its_rows) for its_rows in rows]
        stages = Stages()
        weights = self._weights(score)
        if not any(map(len, row_ids)):
            return [Hits([], self.root) for _ in texts]
        with stages.timed("text_tower"):
            embeddings = self.model.text.encode(texts)
        candidates = [
            (its_rows, read_embeddings(self.committed, its_rows) @ embedding)
            for its_rows, embedding in zip(row_ids, embeddings, strict=True)
        ]
        return self._ranked(texts, candidates, weights, stages)

    def score_pairs(
        self,
        pairs: Sequence[Sequence[str | ImageQuery]],
        *,
        score: str | ScoreWeights | None = None,
    ) -> list[float]:
        """Return the final score of each (text, image) pair.

        Args:
            pairs: pairs of a text and an image. The image is a row of the index, named
                by row id or uri; or any image, given as `Path` of an image file, bytes
                of an image file, or PIL image.
            score: final score to compute, see `open`; None selects the score that was
                given to `open`.
        """
        given = [
            as_list(pair, "pairs", "pairs of a text and an image")
            for pair in as_list(pairs, "pairs", "pairs")
        ]
        if any(len(pair) != 2 for pair in given):
            raise UsageError(
                f"pairs must be pairs of a text and an image, got {shown(pairs)}",
                parameter="pairs",
            )
        texts = _texts([text for text, _ in given], "pairs")
        images = [image for _, image in given]
        weights = self._weights(score)
        has_tokens = reads_tokens(weights.parts)
        stages = Stages()
        scores: list[float] = []
        for start in range(0, len(given), _PAIRS_AT_ONCE):
            part = slice(start, start + _PAIRS_AT_ONCE)
            tokens, embeddings = self._encoded(
                images[part], stages, has_tokens=has_tokens
            )
            similarities = (embeddings * self.model.text.encode(texts[part])).sum(
                axis=1
            )
            of_pairs = self.model.scorer.images(tokens) if has_tokens else None
            of_part = self.model.scores(
                weights, texts[part], similarities, of_pairs, stages
            )
            scores += of_part.final.tolist()
        return scores

    def search_image(
        self, image: ImageQuery, k: int = 10, *, where: str | None = None
    ) -> Hits:
        """Return the `k` images of the index with the embeddings most similar to the
        embedding of `image`, best first. They have no relevance: the similarity of two
        photos is no measure of a match, and is high for unlike photos, too.

        Args:
            image: row id of an image, or path of an image file, bytes of an image file,
                or a PIL image. If it is a row id, this row is not among the hits.
            k: number of hits.
            where: filter, as for `search`.

        Examples:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> photo = index.search("a dog", k=1)[0].uri
            >>> index.search_image(photo, k=1)[0].embedding_score > 0.999
            True
            >>> 2 in [hit.row_id for hit in index.search_image(2, k=3)]
            False
        """
        k = as_count(k, "k")
        stages = Stages()
        passing = None if where is None else self.rows.passing(where)
        embedding = self._encoded([_of_file(image)], stages)[1][0]
        # If the query is a row, this row is its own nearest row, but it is not a hit.
        # One more row is therefore requested.
        row_id = int(image) if isinstance(image, int | np.integer) else -1
        with stages.timed("nearest"):
            rows, values = self._ann.nearest(
                embedding, k + 1 if row_id >= 0 else k, passing
            )
        values = values[rows != row_id]
        rows = rows[rows != row_id]
        scores = Scores(values, values, None, {EMBEDDING: values})
        hits = self._hits(rows, scores, None, slice(0, len(rows)), stages, k)
        return Hits(hits, self.root, stages)

    def _encoded(
        self, images: list[Any], stages: Stages, *, has_tokens: bool = False
    ) -> tuple[Blocks, Floats]:
        """Return the tokens, bfloat16 [b, m, d], and the embeddings, float32 [b,
        embed_dim], of images. Integers and strings are row ids and uris of rows, and
        other images are encoded. If `has_tokens` is False, the tokens of rows are not
        read.
        """
        spec = self.manifest.spec
        tokens = np.empty((len(images), *spec.block_shape), BF16)
        embeddings = np.empty((len(images), spec.embed_dim), np.float32)
        is_row = np.array([isinstance(each, int | str | np.integer) for each in images])
        if is_row.any():
            rows = requested_rows(
                self.committed, [images[at] for at in np.flatnonzero(is_row)]
            )
            embeddings[is_row] = read_embeddings(self.committed, rows)
            if has_tokens:
                tokens[is_row] = self.store.fetch(rows)
        if not is_row.all():
            new = [images[at] for at in np.flatnonzero(~is_row)]
            with stages.timed("vision_tower"):
                tokens[~is_row], embeddings[~is_row] = encode_images(
                    self.model.image_encoder, new
                )
        return tokens, embeddings

    def search_texts(
        self,
        image: ImageQuery,
        texts: Sequence[str],
        k: int = 10,
        pool: int | None = None,
        *,
        score: str | ScoreWeights | None = None,
    ) -> list[TextHit]:
        """Return the `k` texts that best describe `image`, best first: image-to-text
        search.

        Args:
            image: row id of the image, or path of an image file, bytes of an image
                file, or a PIL image. The tokens of a row are read from the index. Other
                images are encoded.
            texts: texts to choose from.
            k: number of hits.
            pool: number of texts to re-rank; at least `k`; None as for `search`. The
                texts whose embeddings are most similar to the image embedding are
                re-ranked.
            score: final score to sort by, see `open`; None selects the score that was
                given to `open`.

        Examples:
            >>> from edje_index import TokenIndex
            >>> index = TokenIndex.open("photos.edje")
            >>> texts = ["a dog", "a canoe", "two cats"]
            >>> len(index.search_texts("photos/3.jpg", texts, k=2))
            2
        """
        texts = _texts(texts, "texts")
        if not texts:
            raise UsageError(
                "texts is empty: give at least one text", parameter="texts"
            )
        k, pool = _counts(k, pool, self.default_pool)
        weights = self._weights(score, direction=IMAGE_TO_TEXT)
        stages = Stages()
        has_tokens = reads_tokens(weights.parts)
        block, (embedding,) = self._encoded(
            [_of_file(image)], stages, has_tokens=has_tokens
        )
        similarities = self.model.text.encode(texts) @ embedding
        nearest = np.argsort(-similarities, kind="stable")[:pool]
        captions = [texts[position] for position in nearest]
        images = None
        if has_tokens:
            # every pair has the image at position 0
            same_image = torch.zeros(len(nearest), dtype=torch.int64, device="cpu")
            images = self.model.scorer.images(block).at(same_image)
        scores = self.model.scores(
            weights, captions, similarities[nearest], images, stages
        )
        relevances = relevance(scores.final, weights)
        return [
            TextHit(
                position=int(nearest[at]),
                text=captions[at],
                score=float(scores.final[at]),
                embedding_score=float(scores.similarities[at]),
                relevance=float(relevances[at]),
                parts={name: float(part[at]) for name, part in scores.parts.items()},
            )
            for at in np.argsort(-scores.final, kind="stable")[:k]
        ]


def _texts(texts: object, name: str = "query") -> list[str]:
    """Return the texts of a sequence, array or iterator as a list. Raise UsageError if
    an entry is blank or is not a string. `name` is the name of the argument in error
    messages.
    """
    given = as_list(texts, name, "strings")
    checked = []
    for at, value in enumerate(given):
        where = name if len(given) == 1 else f"{name}[{at}]"
        checked.append(as_text(value, where))
        if not checked[-1].strip():
            raise UsageError(
                f"{where} is empty or blank, got {shown(value)}: give a text",
                parameter=where,
            )
    return checked


def _of_file(image: ImageQuery) -> Any:
    """Return `image`, a string as a path. Elsewhere, a string is the uri of a row."""
    return as_path(image, "image") if isinstance(image, str) else image


def _counts(k: object, pool: object, default: int) -> tuple[int, int]:
    """Return `k` and `pool` as integers. If `pool` is None, the pool is `default`, or
    `k` if `k` is larger. Raise UsageError if `k` or `pool` is less than 1, or if `pool`
    is less than `k`.
    """
    hits = as_count(k, "k")
    candidates = max(hits, default) if pool is None else as_count(pool, "pool")
    if candidates < hits:
        raise UsageError(
            f"k must be at most pool, got k = {hits} and pool = {candidates}",
            parameter="pool",
        )
    return hits, candidates
