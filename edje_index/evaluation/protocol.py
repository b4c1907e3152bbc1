"""Selects the queries and candidates of an evaluation.

- Split protocol: queries and candidates are the images and captions of one split.
- Full-dataset protocol: queries as in the split protocol. The candidates are all images
  in the index and the captions of all splits (LightningDOT, Sun et al., NAACL 2021, and
  the appendix of the EDJE paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc

from edje_index.captions.matching import MatchedRows
from edje_index.captions.reading import CaptionedImage
from edje_index.evaluation.recall import Pools, embedding_pools
from edje_index.scoring.weights import TEXT_TO_IMAGE
from storage_formats.arrays import Floats, Ints
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows


@dataclass(frozen=True)
class EvaluationSet:
    """Queries and candidates of both directions.

    Attributes:
        rows: row ids of the candidate images, ascending, int64 [r].
        caption_rows: row id of the image of each caption, int64 [c]; -1 if the image is
            not a candidate.
        query_captions: indices in `captions` of the queries for text-to-image search,
            int64.
        query_rows: row ids of the queries for image-to-text search, int64.
    """

    rows: Ints
    captions: tuple[str, ...]
    caption_rows: Ints
    query_captions: Ints
    query_rows: Ints

    def images_of_queries(self, direction: str) -> Ints:
        """Return the row id of the image of each query in one direction, int64 [q]."""
        if direction == TEXT_TO_IMAGE:
            return self.caption_rows[self.query_captions]
        return self.query_rows

    def pools(
        self, direction: str, images: Floats, captions: Floats, size: int
    ) -> Pools:
        """Return the `size` candidates nearest to each query in one direction.

        Args:
            images: embeddings of the images `rows`, float32 [r, e].
            captions: embeddings of the captions, float32 [c, e].
        """
        relevant = self.images_of_queries(direction)
        if direction == TEXT_TO_IMAGE:
            queries = captions[self.query_captions]
            return embedding_pools(queries, images, relevant, self.rows, size)
        queries = images[np.searchsorted(self.rows, relevant)]
        return embedding_pools(queries, captions, relevant, self.caption_rows, size)

    def pairs(self, direction: str, pools: Pools) -> tuple[Ints, Ints]:
        """Return the position of the caption and the row id of each candidate in
        `pools`, int64 of shapes that broadcast to [q, p].
        """
        if direction == TEXT_TO_IMAGE:
            return self.query_captions[:, None], self.rows[pools.candidates]
        return pools.candidates, self.query_rows[:, None]

    def subsampled(self, queries: int, seed: int) -> EvaluationSet:
        """Return a copy with at most `queries` random queries per direction.

        A smaller sample is part of a larger sample with the same seed.
        """
        rng = np.random.default_rng(seed)
        captions, rows = (
            rng.permutation(every)[:queries]
            for every in (self.query_captions, self.query_rows)
        )
        return replace(self, query_captions=np.sort(captions), query_rows=np.sort(rows))


def split_set(captions_of: Sequence[Sequence[str]], rows: Ints) -> EvaluationSet:
    """Return the queries and candidates of the split protocol.

    Args:
        captions_of: captions of each of n images.
        rows: row id of each image, int64 [n]. Equal row ids mean one image.
    """
    captions = tuple(caption for group in captions_of for caption in group)
    about = np.repeat(rows, list(map(len, captions_of)))
    images = np.unique(rows)
    return EvaluationSet(images, captions, about, np.arange(len(captions)), images)


def full_set(
    index: CommittedIndex,
    split: EvaluationSet,
    others: Sequence[CaptionedImage],
    matched: MatchedRows,
) -> EvaluationSet:
    """Return the queries and candidates of the full-dataset protocol.

    Args:
        others: captioned images with additional captions. Captions that are already in
            `split` are left out.
        matched: row of each image in `others`.
    """
    # The captions of `others` come first, so that ties with equal texts never raise the
    # recall.
    split_captions = set(zip(split.caption_rows.tolist(), split.captions, strict=True))
    added = [
        (caption, int(row))
        for item, row in zip(others, matched.rows, strict=True)
        for caption in item.captions
        if (int(row), caption) not in split_captions
    ]
    table = read_all_rows(index, ["row_id", "status"])
    return EvaluationSet(
        rows=table.filter(pc.equal(table["status"], INDEXED))["row_id"].to_numpy(),
        captions=(*(caption for caption, _ in added), *split.captions),
        caption_rows=np.concatenate(
            [np.array([row for _, row in added], dtype=np.int64), split.caption_rows]
        ),
        query_captions=split.query_captions + len(added),
        query_rows=split.query_rows,
    )
