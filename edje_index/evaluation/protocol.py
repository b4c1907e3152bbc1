"""What is asked, what may be answered, and which answers are right.

Two protocols. "split": the images of the split and their captions are all there is (the usual one). "full": every
indexed image, and the captions of all splits, may be answered, while the questions stay those of the split
(LightningDOT, Sun et al., NAACL 2021; the paper's appendix on full-dataset retrieval).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edje_index.captions.matching import MatchedRows
from edje_index.captions.reading import CaptionedImage
from storage_formats.format.layout import Layout
from storage_formats.format.manifest import Manifest
from storage_formats.format.rows import INDEXED, read_shard_rows

Ints = NDArray[np.int64]
OTHER = -1
"""Image of a caption that is no answer to any question."""


@dataclass(frozen=True)
class EvaluationSet:
    """Questions and answers.

    Attributes:
        rows: int64 [r], ascending row ids of the images that may be answered.
        captions: [c] that may be answered.
        caption_rows: int64 [c], row of the image that each is about; `OTHER` where that is no candidate.
        query_captions: places in `captions` of text-to-image questions.
        query_rows: row ids of image-to-text questions.
    """

    rows: Ints
    captions: tuple[str, ...]
    caption_rows: Ints
    query_captions: Ints
    query_rows: Ints

    def subsampled(self, queries: int, seed: int) -> EvaluationSet:
        """At most `queries` questions of each direction; a larger number keeps those of a smaller one."""
        rng = np.random.default_rng(seed)
        captions, rows = (rng.permutation(every)[:queries] for every in (self.query_captions, self.query_rows))
        return replace(self, query_captions=np.sort(captions), query_rows=np.sort(rows))


def split_set(items: Sequence[CaptionedImage], rows: Ints) -> EvaluationSet:
    """The set of the usual protocol; `rows` [n] are those of `items`, all of them in the index.

    Items of one row (an image under two names, or byte-identical images) are one image with all their captions.
    """
    captions = tuple(caption for item in items for caption in item.captions)
    about = np.repeat(rows, [len(item.captions) for item in items])
    images = np.unique(rows)
    return EvaluationSet(images, captions, about, np.arange(len(captions)), images)


def full_set(
    root: str | Path, asked: EvaluationSet, others: Sequence[CaptionedImage], matched: MatchedRows
) -> EvaluationSet:
    """The set of the full protocol: the questions of `asked`, among all images of the index and `others`' captions too.

    A caption of `others` that `asked` holds for the same image is left out. The rest comes first, so that of two equal
    texts the one that is no right answer wins: recall is never flattered by ties.
    """
    known = set(zip(asked.caption_rows.tolist(), asked.captions, strict=True))
    added = [
        (caption, int(row))
        for item, row in zip(others, matched.rows, strict=True)
        for caption in item.captions
        if (int(row), caption) not in known
    ]
    rows = indexed_rows(root)
    return EvaluationSet(
        rows=rows,
        captions=(*(caption for caption, _ in added), *asked.captions),
        caption_rows=np.concatenate([np.array([row for _, row in added], dtype=np.int64), asked.caption_rows]),
        query_captions=asked.query_captions + len(added),
        query_rows=asked.query_rows,
    )


def indexed_rows(root: str | Path) -> Ints:
    """Row ids of all images of an index, ascending: holes and duplicates are left out."""
    layout, spec = Layout(Path(root)), Manifest.load(root).spec
    parts = []
    for shard in range(spec.shards):
        table = read_shard_rows(layout, shard, ["row_id", "status"])
        statuses = np.array(table["status"].to_pylist())
        parts.append(table["row_id"].to_numpy()[statuses == INDEXED])
    return np.concatenate(parts).astype(np.int64)
