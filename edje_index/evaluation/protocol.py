"""Queries, candidates and right answers of an evaluation.

There are two protocols. In the split protocol, the usual one, queries and candidates are the images and captions of one
split. In the full-dataset protocol the queries are those of the split, but the candidates are all images of the index
and the captions of all splits (LightningDOT, Sun et al., NAACL 2021; the paper's appendix on full-dataset retrieval).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from edje_index.captions.matching import MatchedRows
from edje_index.captions.reading import CaptionedImage
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows

Ints = NDArray[np.int64]
OTHER = -1
"""In place of a row id: the image of a caption is not a candidate."""


@dataclass(frozen=True)
class EvaluationSet:
    """Queries and candidates of both directions.

    Attributes:
        rows: row ids of the candidate images, ascending, int64 [r].
        captions: the candidate captions [c].
        caption_rows: row id of each caption's image, int64 [c]; `OTHER` if the image is not a candidate.
        query_captions: positions in `captions` of the text-to-image queries.
        query_rows: row ids of the image-to-text queries.
    """

    rows: Ints
    captions: tuple[str, ...]
    caption_rows: Ints
    query_captions: Ints
    query_rows: Ints

    def subsampled(self, queries: int, seed: int) -> EvaluationSet:
        """At most `queries` queries per direction. With the same seed, a larger sample contains a smaller one."""
        rng = np.random.default_rng(seed)
        captions, rows = (rng.permutation(every)[:queries] for every in (self.query_captions, self.query_rows))
        return replace(self, query_captions=np.sort(captions), query_rows=np.sort(rows))


def split_set(items: Sequence[CaptionedImage], rows: Ints) -> EvaluationSet:
    """The split protocol over `items`, whose row ids are `rows` [n].

    Items with the same row (an image under two names, or byte-identical images) are one image with all their captions.
    """
    captions = tuple(caption for item in items for caption in item.captions)
    about = np.repeat(rows, [len(item.captions) for item in items])
    images = np.unique(rows)
    return EvaluationSet(images, captions, about, np.arange(len(captions)), images)


def full_set(
    root: str | Path, split: EvaluationSet, others: Sequence[CaptionedImage], matched: MatchedRows
) -> EvaluationSet:
    """The full-dataset protocol: the queries of `split`, with all images of the index and all captions as candidates.

    Captions of `others` that `split` has for the same image are left out. The remaining ones precede those of
    `split`, so that of two equal texts the wrong answer wins: ties never raise the recall.
    """
    split_captions = set(zip(split.caption_rows.tolist(), split.captions, strict=True))
    added = [
        (caption, int(row))
        for item, row in zip(others, matched.rows, strict=True)
        for caption in item.captions
        if (int(row), caption) not in split_captions
    ]
    return EvaluationSet(
        rows=indexed_rows(root),
        captions=(*(caption for caption, _ in added), *split.captions),
        caption_rows=np.concatenate([np.array([row for _, row in added], dtype=np.int64), split.caption_rows]),
        query_captions=split.query_captions + len(added),
        query_rows=split.query_rows,
    )


def indexed_rows(root: str | Path) -> Ints:
    """Row ids of all images of an index, ascending, without holes, duplicates and deleted rows."""
    table = read_all_rows(CommittedIndex.open(root), ["row_id", "status"])
    rows: Ints = table.filter(pc.equal(table["status"], INDEXED))["row_id"].to_numpy()
    return rows
