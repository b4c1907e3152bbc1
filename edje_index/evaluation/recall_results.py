"""Computes the recall of one index in one direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edje_index.evaluation.bootstrap import ClusterBootstrap, Estimate
from edje_index.evaluation.pools import Pools
from edje_index.evaluation.recall import Floats, Ints, hits, ranks_after_reranking
from edje_index.evaluation.results import Result
from edje_index.evaluation.token_sources import TokenSource

_PERCENT = 100.0
_REFERENCE = "bf16"


@dataclass(frozen=True)
class RecallTable:
    """Computes the results of one index in one direction.

    Attributes:
        system: name of the index.
        direction: "t2i" or "i2t".
        pools: pools of the queries.
        cutoffs: values of k for R@k.
        bootstrap: bootstrap over the queries.
    """

    system: str
    direction: str
    pools: Pools
    cutoffs: tuple[int, ...]
    bootstrap: ClusterBootstrap

    def embedding_result(self) -> Result:
        """Return the recall of the embeddings alone."""
        return Result(self.system, self.direction, self._recall(self.pools.ranks))

    def reranked_results(self, pool: int, sources: Sequence[TokenSource], scores: Mapping[str, Floats]) -> list[Result]:
        """Return the recall after re-ranking the first `pool` candidates, one result per precision.

        Args:
            pool: number of candidates to re-rank.
            sources: token source of each precision.
            scores: final scores of the pools by precision, float32 [q, p] each.
        """
        pools = self.pools
        in_pool = self.bootstrap.estimates(_PERCENT * (pools.ranks < pool)[:, None])[0]
        ranks = {
            name: ranks_after_reranking(values, pools.relevant, pool, pools.ranks) for name, values in scores.items()
        }
        reference = _REFERENCE if _REFERENCE in ranks else next(iter(ranks))
        results = []
        for source in sources:
            precision_ranks = ranks[source.precision]
            is_reference = source.precision == reference
            result = Result(
                system=self.system,
                direction=self.direction,
                recall=self._recall(precision_ranks),
                precision=source.precision,
                simulated_from=source.simulated_from,
                bytes_per_image=source.bytes_per_image,
                pool=pool,
                in_pool=in_pool,
                gain=self._difference(precision_ranks, pools.ranks),
                change=None if is_reference else self._difference(precision_ranks, ranks[reference]),
                change_from=None if is_reference else reference,
            )
            results.append(result)
        return results

    def _recall(self, ranks: Ints) -> dict[int, Estimate]:
        return self._estimates(hits(ranks, self.cutoffs).astype(np.float64))

    def _difference(self, ranks: Ints, reference: Ints) -> dict[int, Estimate]:
        return self._estimates(hits(ranks, self.cutoffs).astype(np.float64) - hits(reference, self.cutoffs))

    def _estimates(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[int, Estimate]:
        return dict(zip(self.cutoffs, self.bootstrap.estimates(_PERCENT * values), strict=True))
