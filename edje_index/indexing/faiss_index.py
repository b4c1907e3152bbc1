"""The nearest-neighbour index of the embeddings (SPEC.md section 10).

Embeddings have the length 1, so inner products are cosine similarities. FAISS ids are row ids. Holes have no vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edje_index.errors import ModelError
from edje_index.indexing.ann_kind import AnnKind
from edje_index.indexing.ann_parts import AnnParts, Neighbours
from edje_index.indexing.ann_recall import TARGET_RECALL, Measurement, RecallQueries, held_out, measure_probes
from edje_index.indexing.faiss_file import FaissShape
from edje_index.indexing.faiss_part import (
    FaissIndex,
    centroid_similarity,
    fill_part,
    number_of_lists,
    read_part,
    train_part,
    without_vectors,
    write_part,
)
from edje_index.progress import OnProgress
from storage_formats.atomic import fsync_path, fsync_paths
from storage_formats.errors import CorruptIndexError, UsageError
from storage_formats.extras import name_missing_extra
from storage_formats.format.checksum import crc32c_file, crc32c_stream
from storage_formats.format.index_files import open_index_file, remote_files
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.manifest import CommittedIndex, Manifest
from storage_formats.format.shard_table import FileEntry
from storage_formats.reading.embeddings import IndexedEmbeddings
from storage_formats.writing.snapshots import kept_snapshots, named_files

_DRIFT_ROWS = 2000  # their mean distance from the centroids varies by about 1 % from sample to sample


@dataclass(frozen=True)
class AnnRequest:
    """Requested kind and recall of a nearest-neighbour index.

    Attributes:
        ann: FAISS factory string, see `AnnKind.parse`; "auto" chooses the kind by the number of rows.
        recall: recall to reach for the 100 nearest rows, above 0 and at most 1.
        memory: memory in bytes that the build may use; None for no limit. See `AnnKind.choose`.
    """

    ann: str = "auto"
    recall: float = TARGET_RECALL
    memory: int | None = None

    @classmethod
    def like(cls, ann: Mapping[str, Any]) -> AnnRequest:
        """Return a request for the kind and the recall of an existing index, from `ann` in `index.json`."""
        kind = "Flat" if ann.get("kind") == AnnKind().name else ann.get("factory", "auto")
        return cls(kind, ann.get("recall", {}).get("target", TARGET_RECALL))


def add_ann(root: str | Path, request: AnnRequest = AnnRequest(), on_progress: OnProgress | None = None) -> Manifest:
    """Build the nearest-neighbour index of a finished index, and commit the result.

    No other process may change the index at the same time.

    Example:
        >>> from edje_index import add_ann
        >>> add_ann("pages.edje").ann["kind"]
        'flat'

    Raises:
        UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load`.
        UsageError: `request` is invalid.
        MissingExtraError: FAISS is not installed.
    """
    manifest, layout = Manifest.load(root), Layout(Path(root))
    with name_missing_extra("search"):
        replace_file = not _is_in_use(layout, manifest)
        ann = build_ann(root, manifest.spec, replace_file=replace_file, request=request, on_progress=on_progress)
    changed = replace(manifest, ann=ann)
    changed.write(layout)
    named = named_files(layout, kept_snapshots(CommittedIndex(layout.root, changed)))
    for path in layout.ann.glob("index*.faiss"):
        if layout.relative(path) not in named:
            path.unlink()
    return changed


def _is_in_use(layout: Layout, manifest: Manifest) -> bool:
    """Return True if readers need the file `ann/index.faiss`, so that the new file needs another name.

    The current snapshot needs an undamaged file until the commit, and earlier snapshots need it afterwards. On an
    object store, committed objects are never replaced.
    """
    if manifest.snapshot.number or remote_files(layout.root) is not None:
        return True
    committed = {file.path: file for file in manifest.ann_files}.get(layout.relative(layout.ann_index))
    with contextlib.suppress(OSError), open_index_file(layout.root, layout.ann_index) as file:
        return committed is not None and crc32c_stream(file) == committed.crc32c
    return False


def build_ann(
    root: str | Path,
    spec: IndexSpec,
    *,
    replace_file: bool = True,
    request: AnnRequest = AnnRequest(),
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Build the FAISS index of the committed embeddings. Return the description of the FAISS index for the manifest.

    The recall is measured against exact search. The description contains the number of inverted lists that a search
    must read to reach `request.recall`.

    Args:
        root: directory of the index.
        spec: shape of the index.
        replace_file: True to write, or overwrite, `ann/index.faiss`. False to write a file with a new name.
        request: kind and recall of the FAISS index.
        on_progress: function that is called after each shard.

    Raises:
        UsageError: `request` is invalid.
        OSError: the file cannot be written.
    """
    layout = Layout(Path(root))
    kind = _kind_of(request, spec)
    embeddings = IndexedEmbeddings(layout, spec, list(spec.shard_numbers()))
    index = train_part(kind, embeddings, spec.used_rows)
    fill_part(index, embeddings, on_progress)
    measured: list[Measurement] = []
    if number_of_lists(index):
        queries = RecallQueries.draw(embeddings, None, on_progress)
        measured = measure_probes(queries, AnnParts(embeddings, [index]), request.recall)
    else:
        kind = AnnKind()
    file = _write(layout, index, embeddings, layout.ann_index if replace_file else None)
    vectors = file["vectors"]
    if replace_file and not kind.lists:
        del file["vectors"]  # as in format version 1.0
    description = {"kind": kind.name, "metric": "inner-product", "vectors": vectors, "files": [file]}
    return {**description, "factory": kind.factory, **_tuned(measured, request.recall)} if kind.lists else description


def _kind_of(request: AnnRequest, spec: IndexSpec) -> AnnKind:
    """Return the requested kind of FAISS index.

    Raises:
        UsageError: `request.ann` is not supported, or the FAISS index needs more memory than `request.memory`.
    """
    if request.ann == "auto":
        kind = AnnKind.choose(spec.used_rows, spec.embed_dim, request.memory)
    else:
        kind = AnnKind.parse(request.ann, spec.embed_dim)
    kind.check_memory(spec.used_rows, spec.embed_dim, request.memory)
    return kind


def default_position(manifest: Manifest) -> int | None:
    """Return the position of the kind of the nearest-neighbour index in `AnnKind.defaults`.

    The default kinds are those for the rows of the first FAISS file. Return None for another kind.
    """
    spec, appended = manifest.spec, len(manifest.ann_files) - 1  # an append adds a segment and a file
    built_segments = spec.used_segments[: len(spec.used_segments) - appended]
    defaults = AnnKind.defaults(sum(segment.rows for segment in built_segments), spec.embed_dim)
    factory = AnnRequest.like(manifest.ann).ann
    return next((position for position, kind in enumerate(defaults) if kind.factory == factory), None)


def _tuned(measured: Sequence[Measurement], target: float) -> dict[str, Any]:
    """Return the keys `probes` and `recall` of `ann` in `index.json`, from the last measurement."""
    if not measured:
        return {}
    return {"probes": measured[-1].probes, "recall": {**measured[-1].to_json(), "target": target}}


def extend_ann(layout: Layout, spec: IndexSpec, ann: dict[str, Any], *, memory: int | None = None) -> dict[str, Any]:
    """Write the last segment of `spec` to a new FAISS file.

    If the first FAISS file has inverted lists, the new file uses the same centroids and codes.

    Args:
        layout: paths of the index.
        spec: shape of the index with the new rows.
        ann: description of the existing FAISS files, from the manifest.
        memory: see `AnnKind.choose`. It chooses the kind of the new file if the first file has no inverted lists.

    Returns:
        The description of all FAISS files for the manifest. `ann` is returned unchanged if the index has no
        nearest-neighbour index.

    Raises:
        CorruptIndexError: the first FAISS file is damaged.
        OSError: the file cannot be written.
    """
    if not ann.get("files"):
        return ann
    segment = spec.used_segments[-1]
    embeddings = IndexedEmbeddings(layout, spec, spec.segment_shards(segment))
    files = [{"vectors": ann["vectors"], **file} for file in ann["files"]]
    index = without_vectors(_open_part(layout.root, spec, files[0]))
    if index is None:
        index = train_part(AnnKind.choose(segment.rows, spec.embed_dim, memory), embeddings, segment.rows)
    fill_part(index, embeddings)
    file = _write(layout, index, embeddings, None)
    return {**ann, "vectors": ann["vectors"] + file["vectors"], "files": [*files, file]}


def ann_without_rows(index: CommittedIndex, row_ids: Sequence[int]) -> dict[str, Any]:
    """Remove the rows `row_ids` from all FAISS files. A file that contains one of these rows is written again.

    The centroids are not changed.

    Returns:
        The description of all FAISS files for the manifest.

    Raises:
        CorruptIndexError: a FAISS file is missing or damaged.
        OSError: a file cannot be written.
    """
    layout, ann = Layout(index.root), index.manifest.ann
    files = []
    for file in ({"vectors": ann["vectors"], **file} for file in ann.get("files", [])):
        part = _open_part(index.root, index.manifest.spec, file)
        if part.remove_ids(np.array(row_ids, dtype=np.int64)):
            file = {**file, **_commit_part(layout, part, None)}
        files.append(file)
    return {**ann, "vectors": sum(file["vectors"] for file in files), "files": files} if files else ann


def _write(layout: Layout, index: FaissIndex, embeddings: IndexedEmbeddings, path: Path | None) -> dict[str, Any]:
    """Write a FAISS index. Return the entry of the new file for the manifest."""
    entry = _commit_part(layout, index, path)
    similarity = centroid_similarity(index, held_out(embeddings, _DRIFT_ROWS)[1])
    return entry if similarity is None else {**entry, "similarity": round(similarity, 4)}


def _commit_part(layout: Layout, index: FaissIndex, path: Path | None) -> dict[str, Any]:
    """Write `index` to `path`, and return the entry of the file for the manifest.

    If `path` is None, the file is named after its checksum.
    """
    layout.ann.mkdir(parents=True, exist_ok=True)
    temporary = layout.ann / "index.faiss.partial"
    temporary.unlink(missing_ok=True)  # the old file may be a link
    try:
        write_part(index, temporary)
        fsync_path(temporary)
        if path is None:
            path = layout.ann_part(crc32c_file(temporary)[1])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_paths([layout.ann])
    return {**FileEntry.of(layout, path).to_json(), "vectors": int(index.ntotal)}


class AnnIndex:
    """Finds the nearest rows of a query embedding. Deleted rows are left out.

    Args:
        index: an open index.

    Attributes:
        parts: the FAISS indexes.
        live: bitmap of the rows that are not deleted, one bit per row, lowest bit first; None if no row is deleted.

    Raises:
        UsageError: the index has no nearest-neighbour index.
        CorruptIndexError: a FAISS file is missing or damaged, belongs to another index, or is not one that `build_ann`
            writes.
    """

    def __init__(self, index: CommittedIndex) -> None:
        manifest, root = index.manifest, index.root
        files = [{"vectors": manifest.counts.indexed, **file} for file in manifest.ann.get("files", [])]
        if not files:
            raise UsageError(f"{root} has no nearest-neighbour index; build it with 'edje-index ann build'")
        embeddings = IndexedEmbeddings(Layout(root), manifest.spec)
        self.parts = AnnParts(embeddings, [_open_part(root, manifest.spec, file) for file in files])
        self.live = _live_bitmap(index)
        probes = manifest.ann.get("probes")
        self._probes = None if probes is None else max(1, int(probes))

    @classmethod
    def open(cls, root: str | Path) -> AnnIndex:
        """Open the nearest-neighbour index of the index in the directory `root`.

        Raises:
            UsageError, IncompleteIndexError, CorruptIndexError: as for `Manifest.load` and `AnnIndex`.
        """
        return cls(CommittedIndex.open(root))

    def __len__(self) -> int:
        return len(self.parts)

    def nearest(self, query: NDArray[np.float32], k: int, passing: NDArray[np.bool_] | None = None) -> Neighbours:
        """Return at most `k` nearest rows for one query, best first.

        Args:
            query: query embedding [embed_dim].
            k: number of rows.
            passing: which rows to search, as for `nearest_to_each`.

        Raises:
            ModelError: the query and the embeddings of the index differ in width.
        """
        return self.nearest_to_each(query[None], k, passing)[0]

    def nearest_to_each(
        self, queries: NDArray[np.float32], k: int, passing: NDArray[np.bool_] | None = None
    ) -> list[Neighbours]:
        """Return at most `k` nearest rows for each query, best first.

        Args:
            queries: query embeddings [q, embed_dim].
            k: number of rows per query.
            passing: which rows to search, bool [rows]; deleted rows must be False. The search is then exact. None
                searches all rows that are not deleted.

        Raises:
            ModelError: the queries and the embeddings of the index differ in width.
        """
        width = self.parts.embeddings.spec.embed_dim
        if queries.shape[1] != width:
            raise ModelError(
                f"the query has width {queries.shape[1]}, but the embeddings of the index have width {width}; "
                "use the model that built the index"
            )
        queries = queries.astype(np.float32)
        if passing is not None:
            return self.parts.nearest_exactly(queries, k, passing)
        return self.parts.nearest(queries, k, probes=self._probes, live=self.live)


def _open_part(root: Path, spec: IndexSpec, file: dict[str, Any]) -> FaissIndex:
    entry = FileEntry.from_json(file)
    path = root / entry.path
    try:
        with open_index_file(root, path) as opened:
            return read_part(opened, entry, FaissShape(spec.embed_dim, vectors=int(file["vectors"]), rows=spec.rows))
    except (OSError, ValueError, RuntimeError) as error:  # FAISS raises RuntimeError
        reason = error.strerror if isinstance(error, OSError) else error
        raise CorruptIndexError(
            f"cannot read {path}: {reason}; run 'edje-index verify', or replace the file with 'edje-index ann build'"
        ) from error


def _live_bitmap(index: CommittedIndex) -> NDArray[np.uint8] | None:
    """Return a bitmap of the rows that are not deleted, lowest bit first. Return None if no row is deleted."""
    deleted = index.deleted
    if not len(deleted):
        return None
    row_ids = deleted.row_ids()
    bitmap = np.full(-(-index.manifest.spec.rows // 8), 0xFF, dtype=np.uint8)
    np.bitwise_and.at(bitmap, row_ids // 8, ~np.left_shift(1, row_ids % 8).astype(np.uint8))
    return bitmap
