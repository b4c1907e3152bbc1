"""Explains the tokens of an index by nearest words and by alignment with captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edje_index.bundles.info import JOINT_FOLDER, BundleInfo, matching_bundle, verify_files
from edje_index.bundles.parts import load_scorer
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import CaptionedImage, read_captions
from edje_index.errors import ModelError
from edje_index.evaluation.interpretation.alignment import (
    Distribution,
    PairedTest,
    alignment_scores,
    distributions,
    paired_test,
)
from edje_index.evaluation.interpretation.attention import RowAttention, row_attention
from edje_index.evaluation.interpretation.nearest_words import Vocabulary, WordCounts, count_words
from edje_index.models.joint_scorer import JointScorer
from edje_index.progress import OnProgress
from storage_formats.arguments import as_count
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows
from storage_formats.row_ids import as_indices
from storage_formats.token_store import TokenStore

DEFAULT_SAMPLE = 1000
DEFAULT_ROWS = 6
_BATCH = 64


@dataclass(frozen=True)
class ExplainedIndex:
    """An index to explain.

    Attributes:
        root: directory of the index.
        model: directory of the bundle; None for the bundle that built the index.
        precision: precision of the tokens; None for the first precision of the index.
    """

    root: Path
    model: Path | None = None
    precision: str | None = None


@dataclass(frozen=True)
class ExplainedRow:
    """A row of the index, with the nearest words of the tokens of this row.

    Attributes:
        row_id: row id.
        uri: name of the image in the rows table.
        words: how often each word is the nearest word of a token of this row.
        token_words: nearest word of each of the m tokens.
        attention: attention of the m queries over the image, from which the m tokens were computed.
    """

    row_id: int
    uri: str
    words: WordCounts
    token_words: tuple[str, ...]
    attention: RowAttention


@dataclass(frozen=True)
class Alignment:
    """Alignment scores of the explained index, and of another index if two indexes are compared.

    Attributes:
        edges: bin edges of the histograms.
        first: scores of the explained index.
        second: scores of the other index; None without a comparison.
        test: t-test that compares `second` with `first`; None without a comparison.
        left_out: number of captions without content words. These captions have no score.
    """

    edges: tuple[float, ...]
    first: Distribution
    second: Distribution | None
    test: PairedTest | None
    left_out: int


@dataclass(frozen=True)
class Explanation:
    """The result of `explain_index`.

    Attributes:
        root: directory of the index.
        precision: precision of the tokens.
        trained: False if the weights of the model are random.
        rows: nearest words of single rows.
        sample: number of rows in the random sample.
        words: nearest words of all tokens in the random sample.
        alignment: alignment with captions; None if no captions were given.
        against: directory of the other index; None without a comparison.
    """

    root: Path
    precision: str
    trained: bool
    rows: tuple[ExplainedRow, ...]
    sample: int
    words: WordCounts
    alignment: Alignment | None
    against: Path | None


def explain_index(
    index: ExplainedIndex,
    row_ids: Sequence[int] = (),
    *,
    sample: int = DEFAULT_SAMPLE,
    captions: Captions | None = None,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> Explanation:
    """Find the nearest words of the tokens in an index, and measure the alignment of the tokens with captions.

    For single rows, the attention of the queries over the image is computed too.

    Args:
        index: index to explain.
        row_ids: row ids of single rows to explain. If empty, the first `DEFAULT_ROWS` rows of the random sample.
        sample: number of rows in the random sample.
        captions: captions to measure the alignment with; None for no alignment.
        on_progress: called with the progress. An exception raised by `on_progress` stops this function.

    Raises:
        UsageError: a row has no tokens, `sample` is less than 1, or no caption matches an image of the index.
        ModelError: the bundle is missing, did not build the index, or has word embeddings of another width than the
            tokens.
    """
    row_ids, sample = as_indices(row_ids, "row_ids").tolist(), as_count(sample, "sample")
    opened = _Opened.of(index)
    table = read_all_rows(opened.index, ("row_id", "uri", "status"))
    indexed = np.array(table["row_id"])[np.array(table["status"]) == INDEXED]
    if unknown := sorted(set(row_ids) - set(indexed.tolist())):
        raise UsageError(f"row {unknown[0]} of {index.root} has no tokens; choose a row with the status 'indexed'")
    if not len(indexed):
        raise UsageError(f"the index {index.root} has no tokens, because all inputs failed; choose another index")
    sampled = np.sort(np.random.default_rng(0).permutation(indexed)[:sample])
    shown = np.array(row_ids or sampled[:DEFAULT_ROWS], dtype=np.int64)
    alignment = None if captions is None else _alignment(opened, captions, on_progress)
    vocabulary = Vocabulary(opened.joint)
    nearest = [*opened.nearest(vocabulary, sampled, on_progress)]
    attention = row_attention(index.root, opened.info, shown.tolist(), on_progress)
    ids_of_rows = np.concatenate(opened.nearest(vocabulary, shown, on_progress)).tolist()
    rows = [
        ExplainedRow(
            row_id=row_id,
            uri=str(table["uri"][row_id]),
            words=count_words(vocabulary, ids),
            token_words=tuple(map(vocabulary.word, ids)),
            attention=its_attention,
        )
        for row_id, ids, its_attention in zip(shown.tolist(), ids_of_rows, attention, strict=True)
    ]
    return Explanation(
        root=index.root,
        precision=opened.store.precision,
        trained=opened.info.trained,
        rows=tuple(rows),
        sample=len(sampled),
        words=count_words(vocabulary, np.concatenate(nearest).ravel().tolist()),
        alignment=alignment,
        against=None if captions is None or captions.against is None else captions.against.root,
    )


@dataclass(frozen=True)
class Captions:
    """Captions to measure the alignment with.

    Attributes:
        path: caption file, see `edje_index.captions.reading.read_captions`.
        images: base directory of relative image paths.
        split: split of the caption file; None for the whole file.
        against: another index of the same images, to compare with; None for no comparison.
    """

    path: Path
    images: Path | None = None
    split: str | None = None
    against: ExplainedIndex | None = None


@dataclass(frozen=True)
class _Opened:
    """An open index with the joint encoder that reads its tokens."""

    index: CommittedIndex
    store: TokenStore
    joint: JointScorer
    info: BundleInfo

    @classmethod
    def of(cls, source: ExplainedIndex) -> _Opened:
        index = CommittedIndex.open(source.root)
        info = matching_bundle(index, source.model)
        verify_files(info, [name for name in info.files if name.startswith(JOINT_FOLDER)])
        joint = load_scorer(info, torch.float32, torch.device("cpu"))
        store = TokenStore.open(source.root, source.precision or index.manifest.spec.precisions[0])
        if store.block_shape[1] != joint.width:
            raise ModelError(
                f"{source.root} stores tokens of width {store.block_shape[1]}, but the word embeddings of "
                f"the joint encoder have width {joint.width}; choose an index that a trained bundle built"
            )
        return cls(index, store, joint, info)

    def nearest(
        self, vocabulary: Vocabulary, rows: NDArray[np.int64], on_progress: OnProgress
    ) -> list[NDArray[np.int64]]:
        """Return the token id of the nearest word of each token in `rows`, one int64 array [b, m] per batch of rows."""
        parts = []
        for start in range(0, len(rows), _BATCH):
            on_progress("looking up nearest words, images", start, len(rows))
            parts.append(vocabulary.nearest(self.store.fetch(rows[start : start + _BATCH])))
        return parts

    def matched(self, items: Sequence[CaptionedImage]) -> NDArray[np.int64]:
        """Return the row id of each image in `items`, or -1 for an image without tokens."""
        return match_items(self.index.root, read_all_rows(self.index, NAME_COLUMNS), items).rows

    def scores(
        self, items: Sequence[CaptionedImage], rows: NDArray[np.int64], on_progress: OnProgress
    ) -> NDArray[np.float64]:
        """Return the score S of each caption of each image in `items`, float64 [number of captions].

        `rows` contains the row id of each image, int64 [n].
        """
        parts = []
        for start in range(0, len(items), _BATCH):
            on_progress("measuring alignment, images", start, len(items))
            blocks = self.store.fetch(rows[start : start + _BATCH])
            for item, block in zip(items[start : start + _BATCH], blocks, strict=True):
                parts.append(alignment_scores(self.joint, item.captions, block))
        return np.concatenate(parts)


def _alignment(opened: _Opened, captions: Captions, on_progress: OnProgress) -> Alignment:
    items = read_captions(captions.path, captions.images, captions.split)
    indexes = [opened] if captions.against is None else [opened, _Opened.of(captions.against)]
    rows = [each.matched(items) for each in indexes]
    used = np.logical_and.reduce([each >= 0 for each in rows])
    kept = [item for item, keep in zip(items, used, strict=True) if keep]
    if not kept:
        raise UsageError("no image with captions is in both indexes; compare two indexes of the same images")
    scores = [each.scores(kept, row[used], on_progress) for each, row in zip(indexes, rows, strict=True)]
    has_words = np.logical_and.reduce([~np.isnan(values) for values in scores])
    counted = [values[has_words] for values in scores]
    edges, made = distributions(*counted)
    return Alignment(
        edges=edges,
        first=made[0],
        second=made[1] if len(made) > 1 else None,
        test=paired_test(counted[0], counted[1]) if len(counted) > 1 else None,
        left_out=int((~has_words).sum()),
    )
