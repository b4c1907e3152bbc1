"""Describes the nearest-neighbour index of an index, and says when to build it again. Reads only `index.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edje_index.indexing.ann_kind import AnnKind
from storage_formats.format.manifest import Manifest

_MAX_DRIFT = 1.1
_MAX_FILES = 16


@dataclass(frozen=True)
class AnnInfo:
    """A nearest-neighbour index.

    Attributes:
        kind: "flat", "ivf-flat" or "ivf-pq"; "none" if there is no nearest-neighbour index.
        factory: FAISS factory string of the first file.
        vectors: number of vectors in all files.
        files: number of FAISS files: one of the last `ann build` or `build`, and one per append.
        bytes: length of all files.
        probes: number of inverted lists that a search reads in each file; None if it reads all vectors.
        recall: measured recall: `k`, `queries` and `value`; None if the search is exact or was not measured.
        appended: number of vectors in all files but the first.
        drift: mean distance of appended embeddings from the nearest centroid, relative to the embeddings of the
            first file; None if nothing was appended or there are no centroids.
        rebuild: reasons to build the nearest-neighbour index again.
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
    """Describe the nearest-neighbour index of `manifest`."""
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
    """Return the mean distance of the vectors in all files but the first, relative to that of the first file."""
    measured = [(int(file["vectors"]), 1 - float(file["similarity"])) for file in files if "similarity" in file]
    if len(measured) < 2 or len(measured) < len(files) or measured[0][1] <= 0:
        return None
    appended = sum(vectors for vectors, _ in measured[1:])
    if not appended:
        return None
    return sum(vectors * distance for vectors, distance in measured[1:]) / appended / measured[0][1]
