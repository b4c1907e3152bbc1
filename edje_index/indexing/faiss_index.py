"""Searches the nearest-neighbour index of the embeddings (SPEC.md section 10).

Embeddings have the length 1, so inner products are cosine similarities. FAISS ids are
row ids. Holes have no vector. `faiss_build` writes the FAISS file of a
nearest-neighbour index. Indexes of earlier versions may have several. Rows that were
appended later are compared with the query one by one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.indexing.faiss_file import check_faiss_file
from storage_formats.arrays import as_finite, holes
from storage_formats.errors import UsageError, cannot_read
from storage_formats.format.file_check import FileEntry, open_committed
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.reading.embeddings import IndexedEmbeddings

RECALL_NEIGHBOURS = 100
"""Number of neighbours with which a build measures the recall."""
CANDIDATES_PER_NEIGHBOUR = (2, 8, 32)
"""Numbers of candidates per requested row. A build chooses one of them. If FAISS
stores codes, a search takes this many candidates, and then compares their stored
embeddings with the query.
"""
_FILTERED_CANDIDATES = 8
"""Minimum number of candidates per requested row in a search with a filter. The nearest
rows that pass a filter are further away from the query than the nearest of all rows,
and need more candidates (docs/lab/scale.md).
"""
_SCANNED_ROWS = 4096
"""If at most this number of rows pass a filter, the query is compared with all of them.
This takes about as long as a search of the codes of 1,000,000 rows.
"""
# number of appended rows that are added to the vectors in memory at a time
_ADDED_AT_ONCE = 16_384
PIECE_BYTES = 1 << 20
"""Number of bytes of a FAISS file that are read or written at a time."""

# the stubs of FAISS lack most of its classes
FaissIndex: TypeAlias = Any
Vectors: TypeAlias = NDArray[np.float32]
Neighbours: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Row ids [k] and cosine similarities [k]."""


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
        lists = 0 if rows <= FLAT_LIMIT else math.isqrt(rows)
        kind = cls(lists)
        for values in (2, 4):
            if rows > VECTOR_LIMIT and not width % values:
                kind = cls(lists, width // values)
                if memory is None or kind.build_bytes(rows, width) <= memory:
                    break
        return kind

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


def count_lists(index: FaissIndex) -> int:
    """Return the number of inverted lists; 0 for a flat index."""
    return int(index.nlist) if hasattr(index, "nlist") else 0


def open_part(root: Path, spec: IndexSpec, file: dict[str, Any]) -> FaissIndex:
    """Check and load a FAISS file. Python reads the file, so FAISS cannot open
    other files.
    """
    import faiss

    module: Any = faiss
    entry = FileEntry.from_json(file)
    path = root / entry.path
    try:
        with open_committed(root, entry) as opened:
            check_faiss_file(
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ),
                dimensions=spec.embed_dim,
                vectors=int(file["vectors"]),
                rows=spec.rows,
            )
            return module.read_index(
                module.PyCallbackIOReader(opened.read, PIECE_BYTES)
            )
    except (OSError, ValueError, RuntimeError) as error:
        # FAISS raises RuntimeError
        raise cannot_read(path, error) from error


class AnnIndex:
    """Finds the nearest rows of query embeddings. Deleted rows are left out.

    Attributes:
        live: bitmap of the rows that are not deleted, one bit per row, lowest bit
            first; None if no row is deleted.

    Raises:
        UsageError: the index has no nearest-neighbour index.
    """

    def __init__(self, index: CommittedIndex) -> None:
        import faiss

        manifest = index.manifest
        root = index.root
        spec = manifest.spec
        vectors = manifest.ann.get("vectors", manifest.counts.indexed)
        files = [{"vectors": vectors, **file} for file in manifest.ann.get("files", [])]
        if not files:
            raise UsageError(
                f"{index.location} has no nearest-neighbour index", remedy="ann"
            )
        self._embeddings = IndexedEmbeddings(Layout(root), spec, index=index)
        index.fetch(manifest.ann_files)
        self._parts = [open_part(root, spec, file) for file in files]
        if appended := rows_after_build(manifest):
            flat: FaissIndex = faiss.IndexIDMap2(faiss.IndexFlatIP(spec.embed_dim))
            for segment in appended:
                for first in range(0, len(segment), _ADDED_AT_ONCE):
                    rows = np.array(segment[first : first + _ADDED_AT_ONCE])
                    embeddings = self._embeddings[rows]
                    has_vector = ~holes(embeddings)
                    flat.add_with_ids(embeddings[has_vector], rows[has_vector])
            self._parts.append(flat)
        self.live: NDArray[np.uint8] | None = None
        self._is_live = np.ones(spec.rows, dtype=np.bool_)
        if len(index.deleted):
            self._is_live[index.deleted.row_ids] = False
            self.live = np.packbits(self._is_live, bitorder="little")
        probes = manifest.ann.get("probes")
        self._probes = None if probes is None else max(1, int(probes))
        candidates = manifest.ann.get("candidates", CANDIDATES_PER_NEIGHBOUR[0])
        self._candidates = max(1, int(candidates))
        # The last filter, and for each part the number of rows in each inverted list
        # that pass the filter.
        self._counted: tuple[Any, list[NDArray[np.int64]]] = (None, [])
        if missed := missed_recall(manifest):
            warnings.warn(missed, RuntimeWarning, stacklevel=2)

    def __len__(self) -> int:
        return sum(int(part.ntotal) for part in self._parts)

    def nearest(
        self,
        query: NDArray[np.float32],
        k: int,
        passing: NDArray[np.bool_] | None = None,
    ) -> Neighbours:
        """Return at most `k` nearest rows for one query [embed_dim], best first.
        See `nearest_to_each`.
        """
        return self.nearest_to_each(query[None], k, passing)[0]

    def nearest_to_each(
        self,
        queries: NDArray[np.float32],
        k: int,
        passing: NDArray[np.bool_] | None = None,
    ) -> list[Neighbours]:
        """Return at most `k` nearest rows for each query, best first.

        Args:
            passing: which rows to search, bool [rows]. Deleted rows must be False. None
                searches all rows that are not deleted. The result has `k` rows if at
                least `k` of these rows have embeddings.

        Raises:
            ModelError: the queries and the embeddings of the index differ in width.
        """
        width = self._embeddings.spec.embed_dim
        if queries.shape[1] != width:
            raise ModelError(
                f"the query has width {queries.shape[1]}, but the embeddings of the"
                f" index have width {width}; use the model that built the index"
            )
        queries = as_finite(queries, "query")
        probes = self._probes
        live = self.live
        candidates = self._candidates
        if passing is not None:
            candidates = max(_FILTERED_CANDIDATES, candidates)
            has_codes = not all(map(_is_exact, self._parts))
            scanned = max(_SCANNED_ROWS, candidates * k)
            if has_codes and np.count_nonzero(passing) <= scanned:
                rows = np.flatnonzero(passing)
                vectors = self._embeddings[rows]
                # holes have no embedding
                has_vector = ~holes(vectors)
                rows = rows[has_vector]
                scores = queries @ vectors[has_vector].T
                orders = np.argsort(-scores, axis=1, kind="stable")[:, :k]
                return [
                    (rows[order], similarities[order])
                    for order, similarities in zip(orders, scores, strict=True)
                ]
            # If an unfiltered search reads n rows, a filtered search reads lists with
            # 2 n passing rows.
            probes = self._probes_for(queries, passing, scanned, 2)
            live = np.packbits(passing, bitorder="little")
        elif k > RECALL_NEIGHBOURS + 1 or live is not None:
            # The recall was measured without deleted rows, and with this number of
            # neighbours and the row itself.
            factor = max(1.0, k / RECALL_NEIGHBOURS)
            probes = self._probes_for(queries, self._is_live, k, factor)
        return nearest(
            self._parts,
            self._embeddings,
            queries,
            k,
            probes=probes,
            live=live,
            candidates=candidates,
        )

    def _probes_for(
        self, queries: Vectors, passing: NDArray[np.bool_], least: int, factor: float
    ) -> int | None:
        """Return the number of inverted lists to read. If a search usually reads n
        rows, the lists contain `factor` * n passing rows, and at least `least`. The
        query that needs the most lists decides. None if no list contains a passing row.
        """
        # consecutive searches often have the same filter, so its counts are kept
        of_filter, counts = self._counted
        if of_filter is not passing:
            counts = [_count_passing(part, passing) for part in self._parts]
            self._counted = (passing, counts)
        probes = 0
        for part, in_lists in zip(self._parts, counts, strict=True):
            # one part may contain only the centroids and no vectors
            if not in_lists.any():
                continue
            with _threads_for(queries):
                _, nearest_lists = part.quantizer.search(queries, len(in_lists))
            share = (self._probes or part.nprobe) / len(in_lists)
            needed = max(least, factor * share * part.ntotal)
            passed = np.cumsum(in_lists[nearest_lists], axis=1)
            # The number of lists after which a query still has too few passing rows,
            # plus one: the largest such number of all queries.
            enough = int((passed < needed).sum(axis=1).max()) + 1
            probes = max(probes, min(enough, len(in_lists)))
        return probes or None


def _count_passing(part: FaissIndex, passing: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of vectors in each inverted list whose rows pass."""
    import faiss

    module: Any = faiss
    counts = np.zeros(count_lists(part), np.int64)
    for at in range(len(counts)):
        # FAISS returns no array for an empty list
        if size := part.invlists.list_size(at):
            rows = module.rev_swig_ptr(part.invlists.get_ids(at), size)
            counts[at] = np.count_nonzero(passing[rows])
    return counts


@contextlib.contextmanager
def _threads_for(queries: Vectors) -> Iterator[None]:
    """Let FAISS use at most one thread per query. FAISS does not split a query between
    threads. Threads without a query would be idle, and idle threads spin for a while,
    which slows down the work that follows.
    """
    import faiss

    module: Any = faiss
    threads = module.omp_get_max_threads()
    module.omp_set_num_threads(min(threads, len(queries)))
    try:
        yield
    finally:
        module.omp_set_num_threads(threads)


def _is_exact(part: FaissIndex) -> bool:
    """Return True if `part` stores exact vectors, so that its scores are exact
    inner products.
    """
    return not hasattr(part, "pq")


def nearest(
    parts: Sequence[FaissIndex],
    embeddings: IndexedEmbeddings,
    queries: Vectors,
    k: int,
    *,
    probes: int | None,
    live: NDArray[np.uint8] | None,
    candidates: int,
) -> list[Neighbours]:
    """Search FAISS indexes. Return at most `k` nearest rows for each query, best first,
    with exact similarities.

    Args:
        embeddings: stored embeddings, which are compared if a FAISS index stores codes.
        probes: number of inverted lists to search in each FAISS index; None uses the
            number in the FAISS file.
        live: bitmap of the rows to search, one bit per row, lowest bit first; None
            searches all rows.
        candidates: number of candidates per requested row if a FAISS index stores
            codes.
    """
    import faiss

    module: Any = faiss
    exact = all(map(_is_exact, parts))
    selector = None if live is None else module.IDSelectorBitmap(live)
    scores = [np.empty((len(queries), 0), np.float32)]
    rows = [np.empty((len(queries), 0), np.int64)]
    for part in parts:
        # without codes, one more row than requested shows whether rows tie for the last
        # place
        wanted = min(k + 1 if exact else k * candidates, int(part.ntotal))
        if not wanted:
            continue
        parameters = None
        if lists := count_lists(part):
            parameters = module.SearchParametersIVF(
                nprobe=min(probes or int(part.nprobe), lists), sel=selector
            )
        elif selector is not None:
            parameters = module.SearchParameters(sel=selector)
        with _threads_for(queries):
            part_scores, part_rows = part.search(queries, wanted, params=parameters)
            # If more rows tie for the last place than fit, the choice among them must
            # not depend on k. Otherwise, a row could be on two pages of hits. So the
            # search is repeated with more rows until it has all rows that tie.
            while (
                exact
                and k < wanted < part.ntotal
                and (
                    (part_scores[:, -1] == part_scores[:, k - 1])
                    & (part_rows[:, -1] >= 0)
                ).any()
            ):
                wanted = min(2 * wanted, int(part.ntotal))
                part_scores, part_rows = part.search(queries, wanted, params=parameters)
        scores.append(part_scores)
        rows.append(part_rows)
    neighbours = []
    for query, its_scores, its_rows in zip(
        queries, np.concatenate(scores, 1), np.concatenate(rows, 1), strict=True
    ):
        # FAISS returns -1 if the searched lists contain too few vectors
        filled = its_rows >= 0
        row_ids = its_rows[filled]
        similarities = its_scores[filled]
        if not exact:
            similarities = embeddings[row_ids] @ query
        order = np.lexsort((row_ids, -similarities))[:k]
        neighbours.append((row_ids[order], similarities[order]))
    return neighbours
