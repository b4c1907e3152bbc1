"""Draws the rows that each call requests. Equal seeds give equal rows for all subjects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Pattern: TypeAlias = Literal["random", "contiguous", "listed"]
CacheState: TypeAlias = Literal["cold", "warm", "capped"]

_IVF_PROBES = 32  # inverted lists per query, as in edje_index.indexing.faiss_index


@dataclass(frozen=True)
class Workload:
    """The requests of one run.

    Attributes:
        name: name in reports.
        pattern: "random" rows, "contiguous" rows, or "listed" rows: rows from a few groups of neighbouring rows, like
            the inverted lists of FAISS.
        blocks: number of blocks in all calls together. No row is requested twice.
        pool: blocks per call.
        cache: state of the page cache before the run: "cold", "warm", or "capped" if the files do not fit in the free
            memory.
        threads: number of reader threads. The calls are split among the threads.
    """

    name: str
    pattern: Pattern
    blocks: int
    pool: int
    cache: CacheState = "cold"
    threads: int = 1


def draw_calls(workload: Workload, rows: int, seed: int) -> list[Ids]:
    """Draw the rows of each call. A row is given by its position among all `rows` rows.

    No row is drawn twice, so that a cold run does not read rows that earlier calls have cached.
    """
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
    """Draw `pool` rows per call from a few lists of neighbouring rows. No two calls use the same list."""
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
