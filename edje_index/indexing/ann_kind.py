"""The kinds of FAISS index that `ann/` may contain, and how a kind is chosen."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from storage_formats.errors import UsageError
from storage_formats.format.manifest import Manifest

FLAT_LIMIT = 30_000
"""Up to this number of rows, the FAISS index is flat. Comparing a query with 30,000
vectors of width 384 takes 3 ms.
"""
VECTOR_LIMIT = 100_000
"""Up to this number of rows, the FAISS index stores exact vectors. Above this number,
it stores codes.
"""
_FACTORY = re.compile(r"Flat|IVF([1-9]\d{0,6}),(?:Flat|PQ([1-9]\d{0,4})x4fs)")
_PEAK = 1.2
"""Memory that a build needs at its peak, divided by the size of the FAISS index."""
_ID_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class AnnKind:
    """A kind of FAISS index.

    Attributes:
        lists: number of inverted lists; 0 for a flat index, which compares each query
            with every vector.
        sub_vectors: number of sub-vectors into which product quantization splits a
            vector. Each sub-vector is stored as a 4-bit code. If the number is 0, exact
            vectors are stored.
    """

    lists: int = 0
    sub_vectors: int = 0

    @classmethod
    def parse(cls, factory: str, width: int) -> AnnKind:
        """Parse a FAISS factory string: `Flat`, `IVF<lists>,Flat` or
        `IVF<lists>,PQ<parts>x4fs`.

        Raises:
            UsageError: `factory` has another form, or the number of parts does not
                divide `width`.
        """
        match = _FACTORY.fullmatch(factory)
        if match is None:
            raise UsageError(
                f"the FAISS factory {factory!r} is not supported; use Flat,"
                " IVF<lists>,Flat or IVF<lists>,PQ<parts>x4fs, for example"
                " IVF1000,PQ192x4fs",
                parameter="ann",
            )
        kind = cls(int(match[1] or 0), int(match[2] or 0))
        if kind.sub_vectors and width % kind.sub_vectors:
            raise UsageError(
                f"{factory} splits a vector into {kind.sub_vectors} parts, but the"
                f" embeddings have {width} values; choose a number of parts that"
                f" divides {width}",
                parameter="ann",
            )
        return kind

    @classmethod
    def choose(cls, rows: int, width: int, memory: int | None = None) -> AnnKind:
        """Choose a kind of FAISS index.

        Args:
            memory: memory in bytes that a build may use; None for no limit. If a kind
                with one sub-vector per 2 values needs more than this, the kind with one
                sub-vector per 4 values is chosen, even if that kind needs more too.
        """
        kinds = cls.defaults(rows, width)
        fitting = (
            kind
            for kind in kinds
            if memory is None or kind.build_bytes(rows, width) <= memory
        )
        return next(fitting, kinds[-1])

    @classmethod
    def defaults(cls, rows: int, width: int) -> list[AnnKind]:
        """Return the kinds among which `choose` chooses by memory. The first kind needs
        the most memory.
        """
        lists = 0 if rows <= FLAT_LIMIT else math.isqrt(rows)
        sizes = (
            [width // values for values in (2, 4) if not width % values]
            if rows > VECTOR_LIMIT
            else []
        )
        return [cls(lists, sub_vectors) for sub_vectors in sizes or [0]]

    @property
    def name(self) -> str:
        """Name of the kind, as stored in `ann.kind` of `index.json`."""
        if not self.lists:
            return "flat"
        return "ivf-pq" if self.sub_vectors else "ivf-flat"

    @property
    def factory(self) -> str:
        """FAISS factory string of the kind."""
        codes = f"PQ{self.sub_vectors}x4fs" if self.sub_vectors else "Flat"
        return f"IVF{self.lists},{codes}" if self.lists else codes

    def check_memory(self, rows: int, width: int, memory: int | None) -> None:
        """Raise UsageError if a build with `rows` embeddings of `width` values
        needs more than `memory` bytes.
        """
        need = self.build_bytes(rows, width)
        if memory is not None and need > memory:
            raise UsageError(
                f"the nearest-neighbour index {self.factory} of {rows:,} rows needs"
                f" {need:,} bytes of memory, but only {memory:,} are available; provide"
                " more memory, split the index, or name a FAISS factory with fewer"
                " parts",
                parameter="ann",
            )

    def vector_bytes(self, width: int) -> int:
        """Return the number of bytes that one vector and its id take in the FAISS
        index. Two codes of sub-vectors share a byte.
        """
        return _ID_BYTES + (
            -(-self.sub_vectors // 2) if self.sub_vectors else _FLOAT_BYTES * width
        )

    def build_bytes(self, rows: int, width: int) -> int:
        """Return the memory in bytes that a build with `rows` embeddings of `width`
        values needs at its peak.
        """
        return math.ceil(_PEAK * rows * self.vector_bytes(width))


def missed_recall(manifest: Manifest) -> str | None:
    """Return a message if the recall of the nearest-neighbour index, which the build
    has measured, is below the target of the build. Otherwise return None.
    """
    recall = manifest.ann.get("recall", {})
    value = recall.get("value", 1.0)
    target = recall.get("target", 0.0)
    if value >= target:
        return None
    return (
        f"the nearest-neighbour index finds {100 * value:.1f} % of the nearest rows"
        f" instead of {100 * target:g} %, because its codes are too short for these"
        " embeddings; build it with longer codes or as IVF<lists>,Flat"
    )


def rows_after_build(manifest: Manifest) -> list[range]:
    """Return the ranges of rows that were appended after the nearest-neighbour index
    was built. The FAISS files do not have these rows, so a search compares the query
    with each of them.
    """
    spec = manifest.spec
    built = manifest.ann.get("rows", spec.rows)
    return [
        range(segment.first_row, segment.stop)
        for segment in spec.used_segments
        if segment.first_row >= built
    ]


def rebuild_reasons(manifest: Manifest) -> list[str]:
    """Return the reasons to build the nearest-neighbour index again; empty if there are
    none.
    """
    reasons = [missed] if (missed := missed_recall(manifest)) else []
    appended = sum(map(len, rows_after_build(manifest)))
    if appended > FLAT_LIMIT:
        reasons.append(
            f"a search compares the query with each of {appended:,} appended rows"
        )
    return reasons
