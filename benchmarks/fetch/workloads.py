"""Which blocks are fetched, in what calls: functions of a seed, so that every subject is asked for the same ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Pattern: TypeAlias = Literal["random", "contiguous", "listed"]
CacheState: TypeAlias = Literal["cold", "warm", "capped"]

_IVF_PROBES = 32  # lists that a query of the index visits: edje_index.indexing.faiss_index


@dataclass(frozen=True)
class Workload:
    """What one run asks for.

    Attributes:
        name: what it is called in reports.
        pattern: "random" rows, "contiguous" rows, or "listed": rows of few inverted lists a call, as if the index
            were stored in the order of its lists (simulated: lists of equal length, as many as FAISS would make).
        blocks: blocks in all, none twice.
        pool: blocks a call.
        cache: state of the page cache before the run: "cold", "warm", or "capped": whatever a full read has left
            in memory that is too small for it.
        threads: readers that share the calls.
    """

    name: str
    pattern: Pattern
    blocks: int
    pool: int
    cache: CacheState = "cold"
    threads: int = 1


def draw_calls(workload: Workload, rows: int, seed: int) -> list[Ids]:
    """Row ids of each call; no row appears twice in a run, so a cold run stays cold."""
    rng = np.random.default_rng([seed, workload.blocks, workload.pool])
    if workload.pattern == "listed":
        return _listed_calls(workload, rows, rng)
    blocks = min(workload.blocks, rows)
    if workload.pattern == "contiguous":
        ids = np.arange(blocks) + int(rng.integers(0, rows - blocks + 1))
    else:
        ids = rng.choice(rows, blocks, replace=False)
    return [ids[start : start + workload.pool].astype(np.int64) for start in range(0, blocks, workload.pool)]


def _listed_calls(workload: Workload, rows: int, rng: np.random.Generator) -> list[Ids]:
    """Calls of `pool` rows out of a few runs of neighbouring rows each; no run serves two calls."""
    lists = min(rows, 4 * math.isqrt(rows))
    length = rows // lists
    probes = max(min(_IVF_PROBES, lists), math.ceil(workload.pool / length))
    order = rng.permutation(lists)
    calls = []
    for query in range(max(1, min(workload.blocks // workload.pool, lists // probes))):
        starts = order[query * probes : (query + 1) * probes] * length
        members = (starts[:, None] + np.arange(length)).reshape(-1)
        calls.append(rng.permutation(members)[: workload.pool].astype(np.int64))
    return calls
