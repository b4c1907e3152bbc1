"""Search of an index: text embedding, nearest rows, token fetch, final score, sort (algorithm 2 of the paper)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edje_index.errors import BundleNotFoundError, ModelError
from edje_index.indexing.faiss_index import AnnIndex
from edje_index.scoring.weights import BUNDLE_SCORE, ScoreWeights
from edje_index.search.reranking import Candidates, CandidateScores, Reranker, embedding_scores
from storage_formats.codecs import Blocks
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.manifest import Manifest
from storage_formats.format.rows import read_rows
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle


@dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        row_id: row id of the image.
        uri: where the image came from.
        score: the final score, which hits are sorted by; the embedding similarity without re-ranking.
        embedding_score: cosine similarity of the text and image embeddings.
        joint_score: logit, late interaction and pooled similarity, weighted and summed as in `score`. None if the score
            has none of them.
        parts: the parts of the final score by name, not weighted; see `edje_index.scoring.weights.PART_NAMES`.

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


class TokenIndex:
    """An index and the model bundle that built it, ready to be searched.

    Example:
        >>> from edje_index import TokenIndex
        >>> index = TokenIndex.open("photos.edje")
        >>> hits = index.search("two dogs play in the snow", k=3)
        >>> len(hits), hits[0].score >= hits[2].score
        (3, True)
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        model: ModelBundle,
        *,
        precision: str,
        score: str | ScoreWeights = BUNDLE_SCORE,
    ) -> None:
        self._root = root
        self._ann = AnnIndex(root)
        self._store = TokenStore.open(root, precision)
        self._score = score
        self.manifest = manifest
        self.model = model

    @classmethod
    @name_missing_extra("search")
    def open(
        cls,
        root: str | Path,
        model: str | Path | None = None,
        *,
        precision: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        score: str | ScoreWeights = BUNDLE_SCORE,
    ) -> TokenIndex:
        """Open the index at `root`.

        Args:
            root: the index.
            model: bundle to search with; by default the one that built the index.
            precision: precision of the tokens to re-rank with; by default the first that the index holds.
            device: "auto", "cpu" or "cuda", for the text tower and the joint encoder.
            dtype: data type of the joint encoder's matrix products: "auto", "float32" or "bfloat16". bfloat16 takes
                about half the time on processors that support it, and longer on others.
            score: the score to sort by: "bundle" (the weights of the bundle), "logit", "embedding",
                "PART=WEIGHT,..." or `ScoreWeights`; see `edje_index.scoring.weights.parse_score`.

        Raises:
            UsageError: no index at `root`, it does not hold the precision, or `score` is invalid.
            ModelError: the bundle is missing, did not build this index, or lacks a part that `score` weighs.
        """
        manifest = Manifest.load(root)
        bundle = load_search_model(root, manifest, model, device=device, dtype=dtype)
        bundle.weights("t2i", score)  # refuses what the bundle cannot compute
        return cls(Path(root), manifest, bundle, precision=precision or manifest.spec.precisions[0], score=score)

    def search(
        self,
        text: str,
        k: int = 10,
        pool: int = 100,
        *,
        rerank: bool = True,
        score: str | ScoreWeights | None = None,
    ) -> list[Hit]:
        """The `k` best images for `text`, best first.

        Args:
            text: the query.
            k: number of hits.
            pool: number of candidates, the nearest rows by embedding, that are re-ranked; at least `k`.
            rerank: False keeps the order of the embeddings.
            score: the score to sort by, see `open`; by default that given to `open`.

        Raises:
            UsageError: an empty query, `k` or `pool` out of range, or an invalid `score`.
            ModelError: the score needs tokens and the bundle stores features, or the bundle lacks a part of the score.
        """
        if not text.strip():
            raise UsageError("the query is empty")
        if k < 1 or pool < k:
            raise UsageError(f"need 1 <= k <= pool, got k = {k}, pool = {pool}")
        reranker = None
        if rerank:
            chosen = self._score if score is None else score
            reranker = Reranker(self._root, self.manifest.spec, self.model, score=chosen)
        query = self.model.text.encode([text])[0]
        candidates = Candidates(*self._ann.nearest(query, k if reranker is None else pool))
        if not len(candidates.rows):
            return []
        if reranker is None:
            return self._hits(candidates, embedding_scores(candidates), k)
        blocks = None
        if reranker.reads_tokens:
            candidates, blocks = self._fetch_sound(candidates)
            if not len(candidates.rows):
                return []
        return self._hits(candidates, reranker.scores(text, candidates, blocks), k)

    def _fetch_sound(self, candidates: Candidates) -> tuple[Candidates, Blocks]:
        """The candidates whose blocks are sound, and these blocks. The others are left out with a warning."""
        while True:
            try:
                return candidates, self._store.fetch(candidates.rows)
            except CorruptIndexError as error:
                if not error.row_ids:
                    raise
                warnings.warn(f"candidates are left out of the search: {error}", RuntimeWarning, stacklevel=3)
                is_sound = ~np.isin(candidates.rows, error.row_ids)
                candidates = Candidates(candidates.rows[is_sound], candidates.similarities[is_sound])

    def _hits(self, candidates: Candidates, scores: CandidateScores, k: int) -> list[Hit]:
        # A stable sort: equal scores keep the order of the embeddings.
        order = np.argsort(-scores.final, kind="stable")[:k]
        uris = read_rows(self._root, candidates.rows[order], ["uri"])["uri"].to_pylist()
        return [
            Hit(
                row_id=int(candidates.rows[position]),
                uri=uri,
                score=float(scores.final[position]),
                embedding_score=float(candidates.similarities[position]),
                joint_score=None if scores.joint is None else float(scores.joint[position]),
                parts={part: float(values[position]) for part, values in scores.parts.items()},
            )
            for position, uri in zip(order, uris, strict=True)
        ]


def recorded_bundle(root: str | Path, manifest: Manifest) -> Path:
    """The bundle that built the index at `root`.

    `build` records absolute paths. A relative path is refused, because a stranger who made the
    index could have put another bundle at that path.

    Raises:
        ModelError: the index was not built by a model.
        BundleNotFoundError: its path is relative, or the bundle no longer exists.
    """
    if "bundle" not in manifest.model:
        raise ModelError(
            f"{root} was written from arrays and has no model for text; search it with edje_index.LateInteractionSearch"
        )
    path = Path(manifest.model["bundle"])
    if not path.is_absolute():
        raise BundleNotFoundError(
            f"{root} names its model bundle by the relative path {str(path)!r}, which anyone could have put there: "
            "name the bundle"
        )
    if not path.exists():
        raise BundleNotFoundError(
            f"the model bundle {path} that built {root} no longer exists: name the bundle's current path"
        )
    return path


def load_search_model(
    root: str | Path,
    manifest: Manifest,
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "float32",
) -> ModelBundle:
    """The bundle at `model`, or the one that built the index at `root`, after a check that it built this index.

    Raises:
        ModelError: the bundle is missing, or it did not build this index.
    """
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.info import read_bundle_info

    path = recorded_bundle(root, manifest) if model is None else Path(model)
    info = read_bundle_info(path)
    built_by = manifest.model["fingerprint"]
    if info.encoder_fingerprint != built_by:
        raise ModelError(
            f"the bundle {path} did not build {root}: the encoder fingerprint is {info.encoder_fingerprint} in the "
            f"bundle and {built_by} in the index; name the bundle that built the index"
        )
    return ModelBundle.load(path, device=device, dtype=dtype)
