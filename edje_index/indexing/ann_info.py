"""Describes the nearest-neighbour index of an index, and lists reasons to rebuild it. Only `index.json` is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edje_index.indexing.ann_kind import AnnKind
from storage_formats.format.manifest import Manifest

_MAX_DRIFT = 1.1
_MAX_FILES = 16


@dataclass(frozen=True)
class AnnInfo:
    """Description of a nearest-neighbour index.

    Attributes:
        kind: "flat", "ivf-flat" or "ivf-pq"; "none" if there is no nearest-neighbour index.
        factory: FAISS factory string of the first file.
        vectors: number of vectors in all files.
        files: number of FAISS files. A build writes one file, and each append adds one file.
        bytes: total size of the files.
        probes: number of inverted lists that a search reads in each file; None if a search reads all vectors.
        recall: measured recall, with the keys `k`, `queries` and `value`. None if the search is exact, or if the recall
            was not measured.
        appended: number of appended vectors: all vectors that are not in the first file.
        drift: mean distance of appended embeddings from the nearest centroid, divided by the mean distance of the
            embeddings in the first file. None if nothing was appended, or if there are no centroids.
        rebuild: reasons to rebuild the nearest-neighbour index; empty if there are none.
    """

    kind: str
    factory: str
    vectors: int
    files: int
    bytes: int
    probes: int | None
    recall: dict[str, Any] | None
    appended: int
    drift: float | None
    rebuild: tuple[str, ...]


def describe_ann(manifest: Manifest) -> AnnInfo:
    """Return the description of the nearest-neighbour index in `manifest`."""
    ann, spec = manifest.ann, manifest.spec
    files = ann.get("files", [])
    vectors = int(ann.get("vectors", manifest.counts.indexed if files else 0))
    appended = sum(int(file.get("vectors", 0)) for file in files[1:])
    drift = _drift(files)
    choice = AnnKind.choose(max(1, spec.used_rows), spec.embed_dim)
    kind = str(ann.get("kind", "none"))
    rebuild = []
    if drift is not None and drift > _MAX_DRIFT:
        rebuild.append(f"appended embeddings lie {drift:.2f} times as far from the centroids as the first embeddings")
    if len(files) > _MAX_FILES:
        rebuild.append(f"a search reads {len(files)} files")
    if kind == "flat" and choice.lists and appended:
        rebuild.append(f"{spec.used_rows:,} rows are too many for an exact search")
    return AnnInfo(
        kind=kind,
        factory=str(ann.get("factory", "Flat" if kind == "flat" else "")),
        vectors=vectors,
        files=len(files),
        bytes=sum(entry.bytes for entry in manifest.ann_files),
        probes=ann.get("probes"),
        recall=ann.get("recall"),
        appended=appended,
        drift=None if drift is None else round(drift, 3),
        rebuild=tuple(rebuild),
    )


def _drift(files: list[dict[str, Any]]) -> float | None:
    """Return the value of `AnnInfo.drift`."""
    measured = [(int(file["vectors"]), 1 - float(file["similarity"])) for file in files if "similarity" in file]
    if len(measured) < 2 or len(measured) < len(files) or measured[0][1] <= 0:
        return None
    appended = sum(vectors for vectors, _ in measured[1:])
    if not appended:
        return None
    return sum(vectors * distance for vectors, distance in measured[1:]) / appended / measured[0][1]
