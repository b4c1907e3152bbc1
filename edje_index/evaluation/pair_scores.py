"""Scores of (caption, image) pairs by the joint encoder: each pair once, little padding, resumable."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.evaluation.token_sources import TokenSource
from edje_index.progress import OnProgress
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    from edje_index.models.joint_encoder import JointEncoder

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_PARTS = 3  # logit, late interaction, pooled similarity
CHUNK_PAIRS = 512  # of 64 x 384 bfloat16 blocks: 25 MB
_SAVE_SECONDS = 20.0
_KEY_SHIFT = 40  # a pair in one integer: the caption's place above the row id, which stays below 2^40


@dataclass
class ScoreCache:
    """Parts of scores, kept on disk as they are made: one folder for each `key`; in memory alone without a folder.

    `key` is all that decides a score but for caption and row: another bundle, index, precision or file of captions
    never meets these scores.
    """

    folder: Path | None
    key: Mapping[str, Any]
    _parts: list[tuple[Ints, Floats]] = field(default_factory=list)
    _saved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        digest = hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()
        self._place = self.folder / digest[:24]
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            (self._place / "key.json").write_text(json.dumps(dict(self.key), indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise UsageError(f"cannot keep scores in {self.folder}: {error.strerror}") from error

    def known(self) -> tuple[Ints, Floats]:
        """Every pair [k] that was scored already, ascending, and the parts of its score [k, 3]."""
        parts = [(np.empty(0, np.int64), np.empty((0, _PARTS), np.float32))]
        if self.folder is not None:
            parts += [part for path in sorted(self._place.glob("*.npz")) if (part := _read_part(path)) is not None]
        pairs = np.concatenate([pairs for pairs, _ in parts])
        distinct, first = np.unique(pairs, return_index=True)
        return distinct, np.concatenate([scores for _, scores in parts])[first]

    def add(self, pairs: Ints, scores: Floats) -> None:
        """Take in new scores; they are on disk some seconds later, or after `save`."""
        if self.folder is not None:
            self._parts.append((pairs, scores))
            if time.monotonic() - self._saved > _SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        if self.folder is None or not self._parts:
            return
        name = f"{time.time_ns():020d}-{os.getpid()}"
        staged = self._place / f"{name}.partial"
        with staged.open("wb") as file:
            np.savez(
                file,
                pairs=np.concatenate([pairs for pairs, _ in self._parts]),
                scores=np.concatenate([scores for _, scores in self._parts]),
            )
        staged.rename(staged.with_suffix(".npz"))
        self._parts.clear()
        self._saved = time.monotonic()


def _read_part(path: Path) -> tuple[Ints, Floats] | None:
    """One file of scores; None where it is damaged: then they are made anew."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as part:
            pairs, scores = part["pairs"].astype(np.int64), part["scores"].astype(np.float32)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (pairs, scores) if scores.shape == (len(pairs), _PARTS) and np.isfinite(scores).all() else None


@dataclass(frozen=True)
class PairScorer:
    """The joint encoder over the tokens of one source.

    Attributes:
        joint: the joint encoder.
        source: of the tokens.
        captions: texts.
        cache: of what was scored before.
        late, pooled: whether these parts are asked for; they are 0 otherwise.
    """

    joint: JointEncoder
    source: TokenSource
    captions: Sequence[str]
    cache: ScoreCache
    late: bool
    pooled: bool

    def score(self, captions: Ints, rows: Ints, on_progress: OnProgress) -> Floats:
        """Logits, late interaction and pooled similarity [k, 3] of pairs; a pair that comes again is scored once.

        Args:
            captions: places among the captions [k].
            rows: row ids [k].
            on_progress: of the pairs.
        """
        pairs = pack(captions, rows)
        wanted = np.unique(pairs)
        known, scores = self.cache.known()
        missing = np.setdiff1d(wanted, known, assume_unique=True)
        what = f"pairs, {self.source.precision}"
        made = []
        try:
            for done, chunk in self._chunks(missing):
                on_progress(what, len(wanted) - len(missing) + done, len(wanted))
                scores_made = self._parts(chunk)
                self.cache.add(chunk, scores_made)
                made.append((chunk, scores_made))
        finally:
            self.cache.save()
        on_progress(what, len(wanted), len(wanted))
        return _looked_up([(known, scores), *made], pairs)

    def _chunks(self, pairs: Ints) -> Iterator[tuple[int, Ints]]:
        """(pairs before it, pairs) with captions of like length together: short rows are not padded to long ones."""
        places, which = np.unique(pairs >> _KEY_SHIFT, return_inverse=True)
        if not len(pairs):
            return
        tokenizer = self.joint.tokenizer.tokenizer
        encoded = tokenizer([self.captions[place] for place in places], add_special_tokens=False)["input_ids"]
        lengths = np.array([len(ids) for ids in encoded])
        # The long ones first: what does not fit into memory shows at once, and the estimate of time errs downwards.
        ordered = pairs[np.argsort(-lengths[which], kind="stable")]
        for start in range(0, len(ordered), CHUNK_PAIRS):
            yield start, ordered[start : start + CHUNK_PAIRS]

    def _parts(self, pairs: Ints) -> Floats:
        places, rows = unpack(pairs)
        captions = [self.captions[place] for place in places]
        parts = self.joint.parts(captions, self.source.fetch(rows), late=self.late, pooled=self.pooled)
        found: Floats = torch.stack(parts, dim=1).numpy(force=True)
        return found


def pack(captions: Ints, rows: Ints) -> Ints:
    """Pairs as single integers."""
    packed: Ints = (captions << _KEY_SHIFT) | rows
    return packed


def unpack(pairs: Ints) -> tuple[Ints, Ints]:
    """Places of captions and row ids of packed pairs."""
    return pairs >> _KEY_SHIFT, pairs & ((1 << _KEY_SHIFT) - 1)


def _looked_up(parts: Sequence[tuple[Ints, Floats]], pairs: Ints) -> Floats:
    keys = np.concatenate([part for part, _ in parts])
    values = np.concatenate([values for _, values in parts])
    order = np.argsort(keys, kind="stable")
    found: Floats = values[order][np.searchsorted(keys[order], pairs)]
    return found
