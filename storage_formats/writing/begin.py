"""Steps before the first shard of an index is written (SPEC.md section 11)."""

from __future__ import annotations

import shutil
from pathlib import Path

from storage_formats.atomic import fsync_parent, fsync_paths, make_directories, write_json_atomic
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.zarr_metadata import zarr_documents

_UNFINISHED = (
    ".index.json.*", "manifest/.shards-*", "manifest/.deleted-*", "manifest/.row-map-*", "snapshots/.*.json.*",
    "ann/index.faiss.partial", "tokens/.zarr.json.*", "tokens/*/.zarr.json.*", "embeddings/.zarr.json.*",
)  # fmt: skip


def begin_index(root: str | Path, spec: IndexSpec) -> None:
    """Create the directories and the `zarr.json` files of an index. May be called repeatedly."""
    layout = Layout(Path(root))
    make_directories(layout.root)
    fsync_parent(layout.root)  # the caller may have made it
    folders = [layout.embeddings, layout.rows, layout.ann, layout.staging, layout.receipt(0).parent]
    for name in spec.precisions:
        folders += [layout.token_array(name), layout.checksums(name, 0).parent]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for path, document in zarr_documents(layout, spec).items():
        write_json_atomic(path, document)
    fsync_paths([layout.root, layout.tokens, layout.root / "checksums"])


def clear_staging(root: str | Path) -> None:
    """Remove the private files of workers that crashed. Call this only while no worker writes to the index."""
    layout = Layout(Path(root))
    shutil.rmtree(layout.staging, ignore_errors=True)
    layout.staging.mkdir(parents=True, exist_ok=True)
    remove_unfinished(layout)


def remove_unfinished(layout: Layout) -> None:
    """Remove the temporary files that a killed process left while it wrote a manifest or metadata."""
    for pattern in _UNFINISHED:
        for path in layout.root.glob(pattern):
            path.unlink()
