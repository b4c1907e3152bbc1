"""Explains the tokens of an index as in the EDJE paper: by nearest words, attention,
and alignment with captions. Explains why a query found an image.

- The nearest word of a token is the entry of the vocabulary whose word embedding has
  the highest cosine similarity to the token. The `<image>` placeholder is left out.
- A compressed adapter computes each token by the attention of a learned query over the
  patches of the image. The index does not store these attention weights, so the vision
  tower encodes the image again.
- The alignment score S is the "Image-Caption Token Alignment" of the EDJE paper. For
  each content word of the caption, take the highest cosine similarity with a stored
  token of the image. S is the mean of these similarities.
- For a search query, the late interaction shows which tokens match each content word.
  Replacing one token at a time by the mean token shows which tokens the joint encoder
  needs. The attention weights show which patches a token represents. A token of a local
  adapter represents exactly one patch.
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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from edje_index.captions.matching import match_items
from edje_index.captions.reading import read_captions
from edje_index.images.clips import is_clip
from edje_index.images.decode import DEFAULT_MAX_PIXELS, decode_partial
from edje_index.indexing.image_encoder import ImageEncoder
from edje_index.inputs.thumbnails import (
    PHOTO_COLUMNS,
    PHOTO_ERRORS,
    describe_photo_error,
    read_photo,
)
from edje_index.models.adapter import COMPRESSED, LOCAL, CompressionAdapter
from edje_index.models.devices import as_tensor, inference, plain_torch
from edje_index.models.joint_scorer import JointScorer
from edje_index.progress import OnProgress
from edje_index.scoring.parts import content_token_mask, late_interaction
from edje_index.scoring.weights import TEXT_TO_IMAGE
from edje_index.search.token_index import TokenIndex
from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import Json
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.format.rows import INDEXED, read_all_rows, read_rows
from storage_formats.format.tombstones import as_indices

# number of rows that are explained if the caller names neither rows nor a query
_ROWS = 6
# size of the random sample of rows whose nearest words are counted
_SAMPLE = 1000
_BATCH = 64
# Number of tokens that are compared with the vocabulary at a time. If the vocabulary
# has 30,522 words, as that of BERT, the similarities take 125 MB.
_CHUNK = 1024
_UNUSED = re.compile(r"\[unused\d+\]")
# number of bins of the histograms of alignment scores
_BINS = 30

# The English stop words of NLTK (Bird, Loper and Klein, "Natural Language Processing
# with Python"). The EDJE paper calls these stop words standard. They have no
# apostrophes here, because `content_words` removes punctuation first.
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
        tokens: number of tokens.
        unused: number of tokens whose nearest word is a reserved entry of the
            vocabulary, such as ``[unused0]``.
    """

    words: tuple[tuple[str, int], ...]
    tokens: int
    unused: int


@dataclass(frozen=True)
class ExplainedRow:
    """A row of the index, with the nearest words of the tokens of this row.

    Attributes:
        words: how often each whole word is the nearest whole word of a token.
        token_words: nearest whole word of each of the m tokens.
        attention: weight of each patch in each of the m tokens, float32 [m, rows,
            columns], where rows x columns is the grid of patches. The weights of a
            token sum to 1. For a compressed adapter, they are attention weights,
            averaged over the heads. A token of a local adapter has the weight 1 at one
            patch. None if the weights cannot be computed.
        pixels: the image as the vision tower reads it, uint8 [height, width, 3]; None
            if `attention` is None.
        no_attention: reason why `attention` is None; otherwise empty.
        match: why the query found this row; None if there is no query.
    """

    row_id: int
    uri: str
    words: WordCounts
    token_words: tuple[str, ...]
    attention: Floats | None
    pixels: NDArray[np.uint8] | None
    no_attention: str = ""
    match: QueryMatch | None = None


@dataclass(frozen=True)
class QueryMatch:
    """Why a query found a row of m tokens.

    Attributes:
        parts: (value, weight) of each part of the final score, by part name.
        words: content words of the query, as the pieces into which the tokenizer splits
            them.
        similarities: cosine similarity of each of `words` and each token, after the
            mean word vector is subtracted as in late interaction, float32 [words, m].
        drops: for each token, how much the logit decreases if this token is replaced by
            the mean of all tokens of the row, float32 [m].
    """

    query: str
    relevance: float | None
    score: float
    parts: dict[str, tuple[float, float]]
    words: tuple[str, ...]
    similarities: Floats
    drops: Floats


@dataclass(frozen=True)
class AlignmentScores:
    """Statistics of the alignment scores of many pairs of an image and a caption.

    Attributes:
        pairs: number of pairs.
        mean: mean of the scores.
        deviation: sample standard deviation of the scores.
        counts: number of scores in each bin of a histogram. The bins are between
            neighbouring values of `Alignment.edges`.
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
        t: t statistic.
        p: p-value. A very small p-value becomes 0.0.
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
        edges: edges of the bins of the histograms, ascending.
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
        """Summarise the scores of the same captions in one or two indexes.

        Args:
            scores: for each index, the score of each caption, float64 [c]. The score of
                a caption without content words is NaN.

        Raises:
            UsageError: fewer than two captions have a score, or the scores of the two
                indexes differ by the same amount for every caption, so that the t-test
                is undefined.
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
        made = [
            AlignmentScores(
                pairs=len(values),
                mean=float(values.mean()),
                deviation=float(values.std(ddof=1)),
                counts=tuple(np.histogram(values, edges)[0].tolist()),
            )
            for values in counted
        ]
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
        rows: the explained rows.
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


@plain_torch()
def explain_index(
    index: Path,
    rows: Sequence[int] = (),
    *,
    model: Path | None = None,
    precision: str | None = None,
    query: str | None = None,
    captions: Path | None = None,
    images: Path | None = None,
    split: str | None = None,
    against: Path | None = None,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> Explanation:
    """Find the nearest words of the tokens in an index, and measure the alignment of
    the tokens with captions.

    The nearest words are counted over a random sample of 1,000 rows. Single rows are
    explained in detail, with the patches of the image that each token represents.

    Args:
        index: directory of the index.
        rows: row ids of single rows to explain. If it is empty, the first hit of
            `query` is explained, or without a query, 6 rows of the random sample.
        model: directory of the model bundle. None for the bundle that built the index.
        precision: precision of the tokens. None for the stored precision of the highest
            fidelity.
        query: text of a query. For each explained row, the result also says why the
            query finds it. None for no query.
        captions: file of captions, to measure how well the words of captions align with
            tokens. None for no alignment.
        images: base directory of relative image paths in `captions`. None for the
            directory of `captions`.
        split: use only this split of `captions`. None for all splits.
        against: another index of the same images. Its alignment is also measured, and a
            t-test compares the two indexes. None for no comparison.
        on_progress: called with the progress. An exception raised by `on_progress`
            stops this function.

    Raises:
        UsageError: a row has no tokens, or no caption matches an image of the index.
        ModelError: the bundle is missing, did not build the index, or makes patch
            features instead of tokens.
    """
    if captions is None and (images or split or against):
        raise UsageError("images, split and against need captions; give captions")
    row_ids = as_indices(rows, "rows").tolist()
    opened = _open(index, model, precision)
    store = opened.store
    table = read_all_rows(opened.committed, ("row_id", "status"))
    indexed = np.array(table["row_id"])[np.array(table["status"]) == INDEXED]
    if unknown := sorted(set(row_ids) - set(indexed.tolist())):
        raise UsageError(
            f"row {unknown[0]} of {index} has no tokens; choose a row with the status"
            " 'indexed'"
        )
    if not len(indexed):
        raise UsageError(
            f"the index {index} has no tokens, because no row is indexed; choose"
            " another index"
        )
    sampled = np.sort(np.random.default_rng(0).permutation(indexed)[:_SAMPLE])
    if query is not None and not row_ids:
        row_ids = [hit.row_id for hit in opened.search(query, k=1)]
    shown = row_ids or sampled[:_ROWS].tolist()
    alignment = None
    if captions is not None:
        compared = [opened]
        if against is not None:
            compared.append(_open(against))
        items = read_captions(captions, images, split)
        matched = [
            match_items(each, items)[0]
            for each in (opened.committed for opened in compared)
        ]
        used = np.logical_and.reduce([its_rows >= 0 for its_rows in matched])
        kept = [item for item, keep in zip(items, used, strict=True) if keep]
        if not kept:
            raise UsageError(
                "no image with captions is in both indexes; compare two indexes of the"
                " same images"
            )
        scores = []
        for each, its_rows in zip(compared, matched, strict=True):
            parts = []
            for start in range(0, len(kept), _BATCH):
                on_progress("measuring alignment, images", start, len(kept))
                blocks = each.store.fetch(its_rows[used][start : start + _BATCH])
                for item, block in zip(
                    kept[start : start + _BATCH], blocks, strict=True
                ):
                    parts.append(
                        alignment_scores(each.model.joint, item.captions, block)
                    )
            scores.append(np.concatenate(parts))
        alignment = Alignment.of(*scores)
    vocabulary = Vocabulary(opened.model.joint)
    nearest: list[int] = []
    for start in range(0, len(sampled), _BATCH):
        on_progress("looking up nearest words, images", start, len(sampled))
        nearest += (
            vocabulary.nearest(store.fetch(sampled[start : start + _BATCH]))
            .ravel()
            .tolist()
        )
    kind = opened.model.info.adapter["kind"]
    has_attention = kind == COMPRESSED or (kind == LOCAL and query is not None)
    ids_of_rows = vocabulary.nearest(store.fetch(shown), whole_words=True).tolist()
    explained: list[ExplainedRow] = []
    photos = read_rows(index, shown, PHOTO_COLUMNS).to_pylist()
    for row_id, row, ids in zip(shown, photos, ids_of_rows, strict=True):
        on_progress("computing attention, images", len(explained), len(shown))
        attention = None
        pixels = None
        problem = f"the tokens of a {kind} adapter have no place in the image"
        if has_attention:
            attention, pixels, problem = _attention(opened.model.image_encoder, row)
        explained.append(
            ExplainedRow(
                row_id=row_id,
                uri=str(row["uri"]),
                words=vocabulary.count(ids),
                token_words=tuple(vocabulary.words[token_id] for token_id in ids),
                attention=attention,
                pixels=pixels,
                no_attention=problem,
                match=None if query is None else match_query(opened, query, row_id),
            )
        )
    return Explanation(
        root=index,
        precision=store.precision,
        trained=opened.model.info.trained,
        rows=tuple(explained),
        sample=len(sampled),
        words=vocabulary.count(nearest),
        alignment=alignment,
        against=against,
    )


def _open(
    root: Path, model: Path | None = None, precision: str | None = None
) -> TokenIndex:
    """Open an index. Raise ModelError if it stores patch features, which the joint
    encoder cannot score.
    """
    opened = TokenIndex.open(
        root, model, precision=precision, device="cpu", dtype="float32"
    )
    opened.model.check_reranks()
    return opened


class Vocabulary:
    """The vocabulary of the joint encoder, with normalised word embeddings."""

    def __init__(self, joint: JointScorer) -> None:
        tokenizer = joint.tokenizer
        self._vectors = functional.normalize(joint.word_vectors.float(), dim=1)
        self._placeholder = tokenizer.image_token_id
        ids = range(len(self._vectors))
        self.words = [
            tokenizer.tokenizer.id_to_token(token_id) or f"[{token_id}]"
            for token_id in ids
        ]
        whole = torch.tensor([is_whole_word(word) for word in self.words])
        # If the vocabulary has no whole words, for example only characters, no entry is
        # left out.
        self._left_out = ~whole if whole.any() else torch.zeros_like(whole)

    @inference()
    def nearest(self, blocks: Blocks | Tensor, *, whole_words: bool = False) -> Ints:
        """Return the token id of the nearest word of each token in `blocks` [k, m,
        d], int64 [k, m]. With `whole_words`, only whole words are compared, see
        `is_whole_word`.
        """
        tokens = as_tensor(blocks)
        flat = functional.normalize(tokens.reshape(-1, tokens.shape[2]).float(), dim=1)
        nearest = []
        for chunk in torch.split(flat, _CHUNK):
            similarities = chunk @ self._vectors.T
            similarities[:, self._placeholder] = -torch.inf
            if whole_words:
                similarities[:, self._left_out] = -torch.inf
            nearest.append(similarities.argmax(dim=1))
        ids: Ints = torch.cat(nearest).reshape(tokens.shape[:2]).numpy()
        return ids

    def count(self, token_ids: Iterable[int]) -> WordCounts:
        """Count the nearest words of tokens. `token_ids` has the token id of the
        nearest word of each token, as `nearest` returns it.
        """
        counts = Counter(self.words[token_id] for token_id in token_ids)
        return WordCounts(
            words=tuple(counts.most_common()),
            tokens=counts.total(),
            unused=sum(
                count for word, count in counts.items() if _UNUSED.fullmatch(word)
            ),
        )


def is_whole_word(word: str) -> bool:
    """Return True for a word of at least three letters. Parts of words, numbers, single
    characters and special tokens are not whole words.
    """
    return len(word) > 2 and word.isalpha()


@inference()
def match_query(index: TokenIndex, query: str, row_id: int) -> QueryMatch:
    """Explain why `query` finds a row of `index`."""
    (hit,) = index.rerank(query, [row_id])
    weights = index.model.weights(TEXT_TO_IMAGE, index.score).by_part()
    joint = index.model.joint
    block = as_tensor(index.store.fetch([row_id]))
    content = content_token_mask(joint.tokenizer)
    ids = [at for at in joint.tokenizer.caption_ids([query])[0] if content[at]]
    mean = joint.mean_word_vector
    words = functional.normalize(joint.word_vectors[ids] - mean, dim=1)
    tokens = functional.normalize(block[0].to(mean.device).float() - mean, dim=1)
    count = len(tokens)
    # In block i of `occluded`, the mean of the tokens replaces token i.
    occluded = block.repeat(count, 1, 1)
    occluded[range(count), range(count)] = block[0].float().mean(dim=0).to(block.dtype)
    logits = joint.score([query] * (count + 1), torch.cat([block, occluded]))
    return QueryMatch(
        query=query,
        relevance=hit.relevance,
        score=hit.score,
        parts={part: (value, weights[part]) for part, value in hit.parts.items()},
        words=tuple(str(joint.tokenizer.tokenizer.id_to_token(at)) for at in ids),
        similarities=(words @ tokens.T).float().numpy(force=True),
        drops=(logits[0] - logits[1:]).float().numpy(force=True),
    )


@inference()
def _attention(
    encoder: ImageEncoder, row: Json
) -> tuple[Floats | None, NDArray[np.uint8] | None, str]:
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
    except PHOTO_ERRORS as error:
        return None, None, describe_photo_error(error)
    patches, _ = encoder.vision.encode(encoder.normalize(pixels[None]))
    # Token i of a local adapter represents patch i, so its weight is 1 at patch i and 0
    # at the others. For a compressed adapter, attention weights replace this matrix.
    weights = np.eye(patches.shape[1], dtype=np.float32)
    if isinstance(encoder.adapter, CompressionAdapter):
        weights = encoder.adapter.query_attention(patches)[0].float().cpu().numpy()
    height, width = encoder.vision.image_size
    # Patches are square, so the grid of patches has the aspect ratio of the image.
    rows = round(math.sqrt(weights.shape[1] * height / width))
    maps = weights.reshape(len(weights), rows, -1)
    return maps, pixels.permute(1, 2, 0).numpy(), ""


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


@inference()
def alignment_scores(
    joint: JointScorer, captions: Sequence[str], block: Blocks | Tensor
) -> NDArray[np.float64]:
    """Return the score S of each caption with one image, float64 [c]. S is NaN for a
    caption without content words.

    Args:
        block: stored tokens of the image [m, d].
    """
    # The late interaction of the final score subtracts the mean word vector, and has
    # other stop words. S does not: `mean` is 0, and all token ids that `content_words`
    # leaves count as content words.
    ids = joint.tokenizer.caption_ids([content_words(caption) for caption in captions])
    words = joint.word_vectors
    tokens = as_tensor(block).to(words.device)
    scores = late_interaction(
        ids,
        tokens.expand(len(ids), -1, -1),
        words,
        np.ones(len(words), dtype=np.bool_),
        mean=torch.zeros_like(words[0]),
    )
    return np.where(list(map(len, ids)), scores.double().numpy(force=True), np.nan)
