"""Explains the tokens of an index as in the EDJE paper: by nearest words, attention,
and alignment with captions.

- The nearest word of a token has the word embedding with the highest cosine similarity
  to the token. The `<image>` placeholder is left out.
- The attention of the m queries of a compressed adapter over the patches of an image is
  not stored. The vision tower encodes the images again.
- S is the "Image-Caption Token Alignment" of the paper. For each content word of the
  caption, take the highest cosine similarity with a stored token of the image. S is the
  mean of these similarities.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.bundles.bundle import load_scorer
from edje_index.bundles.info import (
    ENCODER_FILES,
    JOINT_FOLDER,
    BundleInfo,
    matching_bundle,
    verify_files,
)
from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.errors import ModelError
from edje_index.images.clips import is_clip
from edje_index.images.decode import DEFAULT_MAX_PIXELS, decode_partial
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.inputs.thumbnails import (
    PHOTO_COLUMNS,
    PHOTO_ERRORS,
    describe_photo_error,
    read_photo,
)
from edje_index.models.adapter import COMPRESSED, CompressionAdapter
from edje_index.models.devices import as_tensor
from edje_index.models.joint_inputs import SPECIAL_TOKEN_NAMES
from edje_index.models.joint_scorer import JointScorer
from edje_index.progress import OnProgress
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows, read_rows
from storage_formats.format.tombstones import as_indices
from storage_formats.token_store import TokenStore

_ROWS = 6
# rows whose nearest words are counted
_SAMPLE = 1000
_BATCH = 64
_BINS = 30
# tokens compared at a time: 125 MB of similarities with 30,522 words
_CHUNK = 1024
_UNUSED = re.compile(r"\[unused\d+\]")

# The English stop words of NLTK (Bird, Loper and Klein, "Natural Language Processing
# with Python"), which the EDJE paper calls standard, without apostrophes.
_STOP_WORDS = """ i me my myself we our ours ourselves you youre youve youll youd your
yours yourself yourselves he him his himself she shes her hers herself it its itself
they them their theirs themselves what which who whom this that thatll these those am is
are was were be been being have has had having do does did doing a an the and but if or
because as until while of at by for with about against between into through during
before after above below to from up down in out on off over under again further then
once here there when where why how all any both each few more most other some such no
nor not only own same so than too very s t can will just don dont should shouldve now d
ll m o re ve y ain aren arent couldn couldnt didn didnt doesn doesnt hadn hadnt hasn
hasnt haven havent isn isnt ma mightn mightnt mustn mustnt needn neednt shan shant
shouldn shouldnt wasn wasnt weren werent won wont wouldn wouldnt """
_STOP_WORD_SET = frozenset(_STOP_WORDS.split())


@dataclass(frozen=True)
class WordCounts:
    """How often each word is the nearest word of a token.

    Attributes:
        words: (word, count) pairs, most frequent word first.
        special: number of tokens with a special token as nearest word, such as
            ``[SEP]``.
        unused: number of tokens with a reserved entry of the vocabulary as nearest
            word, such as ``[unused0]``.
    """

    words: tuple[tuple[str, int], ...]
    tokens: int
    special: int
    unused: int


@dataclass(frozen=True)
class ExplainedRow:
    """A row of the index, with the nearest words of the tokens of this row.

    Attributes:
        words: how often each word is the nearest word of a token of this row.
        token_words: nearest word of each of the m tokens.
        attention: attention weights of the m queries over the grid of patches, averaged
            over the heads, float32 [m, rows, columns]. The weights of a query sum to 1.
            None if they cannot be computed.
        pixels: the image as the vision tower reads it, uint8 [height, width, 3]; None
            without `attention`.
        no_attention: reason why there is no `attention`; empty if there is.
    """

    row_id: int
    uri: str
    words: WordCounts
    token_words: tuple[str, ...]
    attention: NDArray[np.float32] | None
    pixels: NDArray[np.uint8] | None
    no_attention: str = ""


@dataclass(frozen=True)
class AlignmentScores:
    """Statistics of the alignment scores of many pairs: number, mean, sample
    standard deviation, and histogram.
    """

    pairs: int
    mean: float
    deviation: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class PairedTest:
    """Result of a two-sided paired t-test between the scores of two indexes.

    Attributes:
        difference: mean of (score with the second index - score with the first index).
        p: p-value. It may underflow to 0.0.
        effect_size: Cohen's d for paired samples: `difference` / standard deviation of
            the differences.
    """

    difference: float
    t: float
    p: float
    effect_size: float


@dataclass(frozen=True)
class Alignment:
    """Alignment scores of the explained index, and of another index if two indexes are
    compared.

    Attributes:
        first: scores of the explained index.
        second: scores of the other index; None without a comparison.
        test: t-test that compares `second` with `first`; None without a comparison.
        left_out: number of captions without content words. These captions have no
            score.
    """

    edges: tuple[float, ...]
    first: AlignmentScores
    second: AlignmentScores | None
    test: PairedTest | None
    left_out: int

    @classmethod
    def of(cls, *scores: NDArray[np.float64]) -> Alignment:
        """Summarise the scores of the same captions in one or two indexes. A score is
        NaN without content words.

        Raises:
            UsageError: there are fewer than two scores, or all differences of two
                indexes are equal, so that the t-test is undefined.
        """
        from scipy.stats import ttest_rel

        has_words = np.logical_and.reduce([~np.isnan(values) for values in scores])
        counted = [values[has_words] for values in scores]
        if len(counted[0]) < 2:
            raise UsageError(
                "alignment needs at least two captions with content words; give more"
                " captions of images in the index"
            )
        edges = np.histogram_bin_edges(np.concatenate(counted), _BINS)
        made = []
        for values in counted:
            counts = tuple(np.histogram(values, edges)[0].tolist())
            made.append(
                AlignmentScores(
                    len(values), float(values.mean()), float(values.std(ddof=1)), counts
                )
            )
        test = None
        if len(counted) > 1:
            differences = counted[1] - counted[0]
            mean = float(differences.mean())
            deviation = float(differences.std(ddof=1))
            if deviation == 0:
                raise UsageError(
                    "the scores of both indexes differ by the same amount for every"
                    " caption, so the t-test is undefined; compare two different"
                    " indexes"
                )
            result = ttest_rel(counted[1], counted[0])
            test = PairedTest(
                mean, float(result.statistic), float(result.pvalue), mean / deviation
            )
        second = made[1] if len(made) > 1 else None
        return cls(
            tuple(edges.tolist()), made[0], second, test, int((~has_words).sum())
        )


@dataclass(frozen=True)
class Explanation:
    """The result of `explain_index`.

    Attributes:
        rows: nearest words of single rows.
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
    root: Path,
    row_ids: Sequence[int] = (),
    *,
    model: Path | None = None,
    precision: str | None = None,
    captions: Path | None = None,
    images: Path | None = None,
    split: str | None = None,
    against: Path | None = None,
    against_model: Path | None = None,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> Explanation:
    """Find the nearest words of the tokens in an index, and measure the alignment of
    the tokens with captions.

    For single rows, the attention of the queries over the image is computed too.

    Args:
        row_ids: row ids of single rows to explain. If empty, the first 6 rows of the
            random sample.
        precision: precision of the tokens; None for the stored precision of the highest
            fidelity.
        captions: caption file to measure the alignment with, see `read_captions`; None
            for no alignment.
        images: base directory of relative image paths in `captions`.
        split: split of the caption file; None for the whole file.
        against: another index of the same images, whose alignment is compared; None for
            no comparison.
        against_model: directory of its bundle; None for the bundle that built it.
        on_progress: called with the progress. An exception raised by `on_progress`
            stops this function.

    Raises:
        UsageError: a row has no tokens, or no caption matches an image of the index.
        ModelError: the bundle is missing, did not build the index, or has word
            embeddings of another width than the tokens.
    """
    row_ids = as_indices(row_ids, "row_ids").tolist()
    opened, store, joint, info = _open(root, model, precision)
    table = read_all_rows(opened, ("row_id", "uri", "status"))
    indexed = np.array(table["row_id"])[np.array(table["status"]) == INDEXED]
    if unknown := sorted(set(row_ids) - set(indexed.tolist())):
        raise UsageError(
            f"row {unknown[0]} of {root} has no tokens; choose a row with the status"
            " 'indexed'"
        )
    if not len(indexed):
        raise UsageError(
            f"the index {root} has no tokens, because all inputs failed; choose another"
            " index"
        )
    sampled = np.sort(np.random.default_rng(0).permutation(indexed)[:_SAMPLE])
    shown = row_ids or sampled[:_ROWS].tolist()
    alignment = None
    if captions is not None:
        compared = [(opened, store, joint)]
        if against is not None:
            compared.append(_open(against, against_model, None)[:3])
        items = read_captions(captions, images, split)
        matched = [
            match_items(each.root, read_all_rows(each, NAME_COLUMNS), items).rows
            for each, _, _ in compared
        ]
        used = np.logical_and.reduce([its_rows >= 0 for its_rows in matched])
        kept = [item for item, keep in zip(items, used, strict=True) if keep]
        if not kept:
            raise UsageError(
                "no image with captions is in both indexes; compare two indexes of the"
                " same images"
            )
        scores = []
        for (_, its_store, its_joint), its_rows in zip(compared, matched, strict=True):
            parts = []
            for start in range(0, len(kept), _BATCH):
                on_progress("measuring alignment, images", start, len(kept))
                blocks = its_store.fetch(its_rows[used][start : start + _BATCH])
                for item, block in zip(
                    kept[start : start + _BATCH], blocks, strict=True
                ):
                    parts.append(alignment_scores(its_joint, item.captions, block))
            scores.append(np.concatenate(parts))
        alignment = Alignment.of(*scores)
    vocabulary = Vocabulary(joint)
    nearest: list[int] = []
    for start in range(0, len(sampled), _BATCH):
        on_progress("looking up nearest words, images", start, len(sampled))
        nearest += (
            vocabulary.nearest(store.fetch(sampled[start : start + _BATCH]))
            .ravel()
            .tolist()
        )
    kind = info.adapter["kind"]
    encoder = None
    if kind == COMPRESSED:
        verify_files(info, ENCODER_FILES)
        encoder = ImageEncoder.of(info, device="cpu", dtype="float32")
    ids_of_rows = vocabulary.nearest(store.fetch(shown)).tolist()
    rows: list[ExplainedRow] = []
    photos = read_rows(root, shown, PHOTO_COLUMNS).to_pylist()
    for row_id, row, ids in zip(shown, photos, ids_of_rows, strict=True):
        on_progress("computing attention, images", len(rows), len(shown))
        attention = None
        pixels = None
        problem = (
            f"the adapter is {kind}, and only a {COMPRESSED} adapter has queries over"
            " patches"
        )
        if encoder is not None:
            attention, pixels, problem = _attention(encoder, row)
        token_words = tuple(vocabulary.words[token_id] for token_id in ids)
        words = vocabulary.count(ids)
        uri = str(row["uri"])
        rows.append(
            ExplainedRow(row_id, uri, words, token_words, attention, pixels, problem)
        )
    return Explanation(
        root=root,
        precision=store.precision,
        trained=info.trained,
        rows=tuple(rows),
        sample=len(sampled),
        words=vocabulary.count(nearest),
        alignment=alignment,
        against=against,
    )


def _open(
    root: Path, model: Path | None, precision: str | None
) -> tuple[CommittedIndex, TokenStore, JointScorer, BundleInfo]:
    """Open an index, and load the joint encoder whose word embeddings are compared
    with the tokens.
    """
    index = CommittedIndex.open(root)
    info = matching_bundle(index, model)
    verify_files(info, [name for name in info.files if name.startswith(JOINT_FOLDER)])
    joint = load_scorer(info, torch.float32, torch.device("cpu"))
    store = TokenStore(index, precision)
    if store.block_shape[1] != joint.width:
        raise ModelError(
            f"{root} stores tokens of width {store.block_shape[1]}, but the word"
            f" embeddings of the joint encoder have width {joint.width}; choose an"
            " index that a trained bundle built"
        )
    return index, store, joint, info


class Vocabulary:
    """The vocabulary of the joint encoder, with normalised word embeddings."""

    def __init__(self, joint: JointScorer) -> None:
        tokenizer = joint.tokenizer
        self._vectors = functional.normalize(joint.word_vectors.float(), dim=1)
        self._placeholder = tokenizer.image_token_id
        self._special = frozenset(map(tokenizer.special_id, SPECIAL_TOKEN_NAMES))
        ids = range(len(self._vectors))
        self.words = [
            tokenizer.tokenizer.id_to_token(token_id) or f"[{token_id}]"
            for token_id in ids
        ]

    @torch.inference_mode()
    def nearest(self, blocks: Blocks | torch.Tensor) -> NDArray[np.int64]:
        """Return the token id of the nearest word of each token in `blocks` [k, m,
        d], int64 [k, m].
        """
        tokens = as_tensor(blocks)
        flat = functional.normalize(tokens.reshape(-1, tokens.shape[2]).float(), dim=1)
        nearest = []
        for chunk in torch.split(flat, _CHUNK):
            similarities = chunk @ self._vectors.T
            similarities[:, self._placeholder] = -torch.inf
            nearest.append(similarities.argmax(dim=1))
        ids: NDArray[np.int64] = torch.cat(nearest).reshape(tokens.shape[:2]).numpy()
        return ids

    def count(self, token_ids: Iterable[int]) -> WordCounts:
        """Count the nearest words. `token_ids` contains the token id of the nearest
        word of each token.
        """
        counts = Counter(token_ids)
        ordered = sorted(
            counts.items(), key=lambda item: (-item[1], self.words[item[0]])
        )
        return WordCounts(
            words=tuple((self.words[token_id], count) for token_id, count in ordered),
            tokens=counts.total(),
            special=sum(
                count for token_id, count in ordered if token_id in self._special
            ),
            unused=sum(
                count
                for token_id, count in ordered
                if _UNUSED.fullmatch(self.words[token_id])
            ),
        )


@torch.inference_mode()
def _attention(
    encoder: ImageEncoder, row: dict[str, Any]
) -> tuple[NDArray[np.float32] | None, NDArray[np.uint8] | None, str]:
    """Return the members `attention`, `pixels` and `no_attention` of `ExplainedRow`."""
    try:
        data = read_photo(row)
        if is_clip(data):
            return (
                None,
                None,
                "the row is a clip, and attention is shown for images only",
            )
        image = decode_partial(data, DEFAULT_MAX_PIXELS)[0]
        pixels = encoder.preprocess(image)
        resized = encoder.preprocess.resize(image)
    except PHOTO_ERRORS as error:
        return None, None, describe_photo_error(error)
    assert isinstance(encoder.adapter, CompressionAdapter)
    patches, _ = encoder.vision.encode(pixels.unsqueeze(0))
    weights = encoder.adapter.query_attention(patches)[0].float().cpu().numpy()
    height, width = encoder.vision.image_size
    # patches are squares
    rows = round(math.sqrt(weights.shape[1] * height / width))
    return weights.reshape(len(weights), rows, -1), np.asarray(resized), ""


def content_words(caption: str) -> str:
    """Return the words of a caption without stop words and punctuation, in lower case,
    separated by spaces.

    Examples:
        >>> from edje_index.evaluation.explain import content_words
        >>> content_words("A child playing in the ocean.")
        'child playing ocean'
    """
    kept = "".join(
        character
        for character in caption.lower()
        if character not in string.punctuation
        and not unicodedata.category(character).startswith("P")
    )
    return " ".join(word for word in kept.split() if word not in _STOP_WORD_SET)


@torch.inference_mode()
def alignment_scores(
    joint: JointScorer, captions: Sequence[str], block: Blocks | torch.Tensor
) -> NDArray[np.float64]:
    """Return the score S of each caption with one image, float64 [c]. S is NaN for a
    caption without content words.

    Args:
        block: stored tokens of the image [m, d].
    """
    # The late interaction of the final score differs: it subtracts the mean word vector
    # and has other stop words.
    ids = joint.tokenizer.caption_ids([content_words(caption) for caption in captions])
    distinct = sorted({token_id for caption in ids for token_id in caption})
    if not distinct:
        return np.full(len(captions), np.nan)
    positions = {token_id: position for position, token_id in enumerate(distinct)}
    words = functional.normalize(joint.word_vectors[distinct].double(), dim=1)
    tokens = functional.normalize(as_tensor(block).to(words.device).double(), dim=1)
    best = (words @ tokens.T).amax(dim=1).tolist()
    return np.array(
        [
            np.mean([best[positions[i]] for i in caption]) if caption else np.nan
            for caption in ids
        ]
    )
