"""Searching an index: text embedding, nearest rows, token fetch, joint encoder, sort (the paper's algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError, name_missing_extra
from edje_index.indexing.faiss_index import AnnIndex
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import Manifest
from storage_formats.format.rows import read_rows
from storage_formats.reading.embeddings import read_embeddings
from storage_formats.token_store import TokenStore

if TYPE_CHECKING:
    from edje_index.bundles.bundle import ModelBundle


@dataclass(frozen=True)
class Hit:
    """One result.

    Attributes:
        row_id: its row.
        uri: where the image came from.
        score: what the hits are sorted by: the final score, or the embedding's without re-ranking.
        embedding_score: cosine similarity of text and image embedding.
        joint_score: the joint encoder's: its logit, with late interaction and pooled similarity where the model has
            them; None without re-ranking.
    """

    row_id: int
    uri: str
    score: float
    embedding_score: float
    joint_score: float | None


@dataclass(frozen=True)
class FinalScorer:
    """The second half of a search, over tokens that the caller has read.

    Attributes:
        root, spec: of the index.
        model: bundle that built it.
    """

    root: Path
    spec: IndexSpec
    model: ModelBundle

    def scores(
        self, text: str, rows: NDArray[np.int64], similarities: NDArray[np.float32], blocks: Blocks
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Joint scores and final scores [k] of a query and candidates: rows and similarities [k], tokens [k, m, d]."""
        joint: NDArray[np.float32] = self.model.joint.score(text, blocks).numpy(force=True)
        final = fused_scores(joint, similarities, self.model.embedding_weight)
        if self.model.bank is None or not self.model.weights.prior:
            return joint, final
        return joint, final - self.model.image_priors(read_embeddings(self.root, self.spec, rows), blocks)


class TokenIndex:
    """An index with the model that it was built by, ready to be searched."""

    def __init__(self, root: Path, manifest: Manifest, model: ModelBundle, precision: str) -> None:
        self._root = root
        self._ann = AnnIndex(root)
        self._store = TokenStore.open(root, precision)
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
    ) -> TokenIndex:
        """Open the index at `root`.

        Args:
            root: the index.
            model: bundle to search with; the one that built the index where it is None.
            precision: tokens to re-rank with; the first that the index holds where it is None.
            device: "auto", "cpu" or "cuda", for the text tower and the joint encoder.
            dtype: of the joint encoder's matrix products, "auto", "float32" or "bfloat16"; the latter takes about half
                the time on processors that have it, and more on others.

        Raises:
            UsageError: no index, no such precision.
            ModelError: the bundle is not there, or it did not build this index.
        """
        manifest = Manifest.load(root)
        bundle = load_search_model(root, manifest, model, device=device, dtype=dtype)
        return cls(Path(root), manifest, bundle, precision or manifest.spec.precisions[0])

    def search(self, text: str, k: int = 10, pool: int = 100, *, rerank: bool = True) -> list[Hit]:
        """The `k` best images for `text`, best first.

        Args:
            text: the query.
            k: number of hits.
            pool: nearest rows by embedding that the joint encoder scores; at least `k`.
            rerank: False keeps the order of the embeddings.

        Raises:
            UsageError: an empty query, or numbers that do not fit.
            ModelError: re-ranking with a bundle that stores features.
        """
        if not text.strip():
            raise UsageError("the query is empty")
        if k < 1 or pool < k:
            raise UsageError(f"need 1 <= k <= pool, got k = {k}, pool = {pool}")
        if rerank:
            check_reranks(self.model)
        query = self.model.text.encode([text])[0]
        rows, similarities = self._ann.nearest(query, pool if rerank else k)
        if not len(rows):
            return []
        joint, scores = None, similarities
        if rerank:
            scorer = FinalScorer(self._root, self.manifest.spec, self.model)
            joint, scores = scorer.scores(text, rows, similarities, self._store.fetch(rows))
        # Stable, so that equal scores keep the order of the embeddings.
        order = np.argsort(-scores, kind="stable")[:k]
        uris = read_rows(self._root, rows[order], ["uri"])["uri"].to_pylist()
        return [
            Hit(
                row_id=int(rows[at]),
                uri=uri,
                score=float(scores[at]),
                embedding_score=float(similarities[at]),
                joint_score=None if joint is None else float(joint[at]),
            )
            for at, uri in zip(order, uris, strict=True)
        ]


def load_search_model(
    root: str | Path,
    manifest: Manifest,
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "float32",
) -> ModelBundle:
    """The bundle at `model`, or the one that built the index `root`, after a check that they belong together.

    Raises:
        ModelError: the bundle is not there, or it did not build this index.
    """
    if model is None and "bundle" not in manifest.model:
        raise ModelError(
            f"{root} was written from arrays and has no model for text; search it with edje_index.LateInteractionSearch"
        )
    from edje_index.bundles.bundle import ModelBundle
    from edje_index.bundles.info import read_bundle_info

    path = Path(model) if model is not None else Path(manifest.model["bundle"])
    if model is None and not path.exists():
        raise ModelError(f"the model bundle {path} that built {root} is gone; name its place with --model")
    info = read_bundle_info(path)
    built_by = manifest.model["fingerprint"]
    if info.encoder_fingerprint != built_by:
        raise ModelError(
            f"the bundle {path} did not build {root}: its encoder is {info.encoder_fingerprint}, "
            f"the index has {built_by}"
        )
    return ModelBundle.load(path, device=device, dtype=dtype)


def check_reranks(model: ModelBundle) -> None:
    """ModelError for a bundle whose stored tokens are features to train on, which its joint encoder cannot read."""
    config = model.adapter.config
    if config.is_feature:
        raise ModelError(
            f"this bundle stores features to train on ({config.kind}), not tokens that its joint encoder was trained "
            "with: search without re-ranking (--no-rerank), or with an index that a trained bundle built"
        )


def fused_scores(
    joint: NDArray[np.float32], similarities: NDArray[np.float32], embedding_weight: float
) -> NDArray[np.float32]:
    """Joint scores + `embedding_weight` x cosine similarities, float32 of their shape: final but for a bank's prior.

    The sum is ALBEF's and BLIP's way of re-ranking; a weight of 0 gives the logits themselves.
    """
    return joint + np.float32(embedding_weight) * similarities
