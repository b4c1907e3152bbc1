"""Photos on disk to build an index from, and the contents that two builds of them
must share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from storage_formats.format.rows import TIMING_COLUMNS, read_rows


def make_photos(folder: Path, count: int) -> None:
    """Write `count` small JPEGs: every seventh is truncated, every eleventh repeats
    the one before.
    """
    folder.mkdir(parents=True)
    for at in range(count):
        path = folder / f"{at:04d}.jpg"
        if at % 11 == 10:
            path.write_bytes((folder / f"{at - 1:04d}.jpg").read_bytes())
            continue
        pixels = np.random.default_rng(at).integers(0, 255, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        if at % 7 == 6:
            path.write_bytes(path.read_bytes()[:1500])


def contents(root: Path) -> dict[str, Any]:
    """The parts of a finished index that two builds of one plan must share."""
    folders = [root / name for name in ("tokens", "embeddings", "checksums", "ann")]
    files = sorted(
        path for folder in folders for path in folder.rglob("*") if path.is_file()
    )
    found: dict[str, Any] = {
        str(path.relative_to(root)): path.read_bytes() for path in files
    }
    found["rows"] = read_rows(root).drop_columns(list(TIMING_COLUMNS)).to_pylist()
    manifest = json.loads((root / "index.json").read_text())
    return found | {name: manifest[name] for name in ("plan", "counts", "rows", "ann")}
