"""Draws the rows of each call. Equal seeds give equal rows for every subject."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Pattern: TypeAlias = Literal["random", "contiguous", "listed"]
CacheState: TypeAlias = Literal["cold", "warm", "capped"]

_IVF_PROBES = 32  # lists that a query visits: edje_index.indexing.faiss_index


@dataclass(frozen=True)
class Workload:
    """The requests of one run.

    Attributes:
        name: name in reports.
        pattern: "random" rows, "contiguous" rows, or "listed" rows, as in a few inverted lists of FAISS.
        blocks: number of blocks in all calls; no row is requested twice.
        pool: blocks per call.
        cache: state of the page cache before the run: "cold", "warm", or "capped" for too little memory to hold the
            files.
        threads: number of reader threads; each makes a part of the calls.
    """

    name: str
    pattern: Pattern
    blocks: int
    pool: int
    cache: CacheState = "cold"
    threads: int = 1


def draw_calls(workload: Workload, rows: int, seed: int) -> list[Ids]:
    """Return the positions of the rows of each call among `rows` rows.

    No row appears twice in a run, so a cold run stays cold.
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
    """Return calls of `pool` rows from a few lists of neighbouring rows. No two calls share a list."""
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
