"""Stores pair scores on disk, so that an interrupted evaluation can resume."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage_formats.errors import UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

SAVE_SECONDS = 20.0


@dataclass
class ScoreCache:
    """Stores scores of pairs in a directory.

    Attributes:
        folder: directory with one subdirectory per key. If it is None, nothing is stored.
        key: everything that determines the score of a pair: bundle, index, precision, captions, data type and part.
    """

    folder: Path | None
    key: Mapping[str, Any]
    _unsaved: list[tuple[Ints, Floats]] = field(default_factory=list)
    _saved_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        digest = hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()
        self._key_folder = self.folder / digest[:24]
        try:
            self._key_folder.mkdir(parents=True, exist_ok=True)
            (self._key_folder / "key.json").write_text(json.dumps(dict(self.key), indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write the score cache {self.folder}: {error.strerror}; choose another directory"
            ) from error

    def load(self) -> tuple[Ints, Floats]:
        """Return the stored pairs in ascending order, int64 [k], and the score of each pair, float32 [k]."""
        parts = [(np.empty(0, np.int64), np.empty(0, np.float32))]
        if self.folder is not None:
            paths = sorted(self._key_folder.glob("*.npz"))
            parts += [part for path in paths if (part := _read_part(path)) is not None]
        pairs = np.concatenate([pairs for pairs, _ in parts])
        distinct, first = np.unique(pairs, return_index=True)
        return distinct, np.concatenate([scores for _, scores in parts])[first]

    def add(self, pairs: Ints, scores: Floats) -> None:
        """Add new scores. Scores are written to disk every `SAVE_SECONDS` seconds."""
        if self.folder is not None:
            self._unsaved.append((pairs, scores))
            if time.monotonic() - self._saved_at > SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        """Write all scores that are not on disk yet."""
        if self.folder is None or not self._unsaved:
            return
        name = f"{time.time_ns():020d}-{os.getpid()}"
        staged = self._key_folder / f"{name}.partial"
        with staged.open("wb") as file:
            np.savez(
                file,
                pairs=np.concatenate([pairs for pairs, _ in self._unsaved]),
                scores=np.concatenate([scores for _, scores in self._unsaved]),
            )
        staged.rename(staged.with_suffix(".npz"))
        self._unsaved.clear()
        self._saved_at = time.monotonic()


def _read_part(path: Path) -> tuple[Ints, Floats] | None:
    """Read one file of scores. Return None if the file is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as part:
            pairs, scores = part["pairs"].astype(np.int64), part["scores"].astype(np.float32)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (pairs, scores) if scores.shape == pairs.shape and np.isfinite(scores).all() else None
