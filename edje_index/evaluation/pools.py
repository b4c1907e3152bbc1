"""Selects the queries and candidates of an evaluation, and computes the parts of the
final score for the pool of each query.

- Split protocol: the queries and the candidates are the images and captions of one
  split.
- Full-dataset protocol: the queries are the same as in the split protocol. The
  candidates are all images in the index and the captions of all splits (LightningDOT,
  Sun et al., NAACL 2021, and the appendix of the EDJE paper).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from torch import Tensor

from edje_index.captions.reading import CaptionedImage
from edje_index.evaluation.recall import Pools, embedding_pools
from edje_index.progress import OnProgress
from edje_index.scoring.parts import Scorer
from edje_index.scoring.weights import EMBEDDING, IMAGE_TO_TEXT, TEXT_TO_IMAGE
from storage_formats.arrays import Floats, Ints
from storage_formats.atomic import replacing
from storage_formats.codecs import Blocks, Codec, codec, finest
from storage_formats.errors import UsageError
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.rows import INDEXED, read_all_rows
from storage_formats.token_store import TokenStore
from storage_formats.writing.conversion import choose_offset

# Number of pairs whose tokens are in memory at a time. For bfloat16 blocks of 64 x 384,
# they take 25 MB.
CHUNK_PAIRS = 512
# One integer represents a pair. The position of the caption is in the high bits, and
# the row id, which is below 2^40, in the low bits.
_KEY_SHIFT = 40
# Scores are written to a file at most once in this time.
_KEEP_SECONDS = 20.0


@dataclass(frozen=True)
class EvaluationSet:
    """Queries and candidates of both directions.

    Attributes:
        rows: row ids of the candidate images, ascending, int64 [r].
        captions: the c candidate captions.
        caption_rows: row id of the image of each caption, int64 [c]; -1 if the image is
            not a candidate.
        query_captions: positions in `captions` of the queries for text-to-image search,
            int64 [q].
        query_rows: row ids of the images that are the queries for image-to-text search,
            int64 [q]. The number of queries can differ between the directions.
    """

    rows: Ints
    captions: tuple[str, ...]
    caption_rows: Ints
    query_captions: Ints
    query_rows: Ints

    def pools(self, images: Floats, captions: Floats, size: int) -> dict[str, Pools]:
        """Return the `size` candidates nearest to each query, by direction. The label
        of a query is the row id of its image: the image that a caption describes, or
        the image itself.

        Args:
            images: embeddings of the images `rows`, float32 [r, e].
            captions: embeddings of the captions, float32 [c, e].
        """
        return {
            TEXT_TO_IMAGE: embedding_pools(
                captions[self.query_captions],
                images,
                self.caption_rows[self.query_captions],
                self.rows,
                size,
            ),
            IMAGE_TO_TEXT: embedding_pools(
                images[np.searchsorted(self.rows, self.query_rows)],
                captions,
                self.query_rows,
                self.caption_rows,
                size,
            ),
        }

    def pairs(self, direction: str, pools: Pools) -> tuple[Ints, Ints]:
        """Return the pair that each candidate in `pools` forms with its query, as the
        position of the caption in `captions` and the row id of the image. The shapes of
        the two int64 arrays broadcast to [q, p].
        """
        if direction == TEXT_TO_IMAGE:
            return self.query_captions[:, None], self.rows[pools.candidates]
        return pools.candidates, self.query_rows[:, None]

    def subsampled(self, queries: int, seed: int) -> EvaluationSet:
        """Return a copy with at most `queries` random queries per direction.

        With the same seed, a larger sample contains every smaller sample.
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
        rows: row id of each image, int64 [n]. Images with equal row ids are one image,
            which has all of their captions.
    """
    captions = tuple(caption for group in captions_of for caption in group)
    caption_rows = np.repeat(rows, list(map(len, captions_of)))
    images = np.unique(rows)
    queries = np.arange(len(captions))
    return EvaluationSet(images, captions, caption_rows, queries, images)


def full_set(
    index: CommittedIndex,
    split: EvaluationSet,
    others: Sequence[CaptionedImage],
    rows: Ints,
) -> EvaluationSet:
    """Return the queries and candidates of the full-dataset protocol.

    Args:
        others: captioned images with additional captions. Captions that are already in
            `split` are left out.
        rows: row of each image in `others`; -1 for an image without a row.
    """
    # Candidates with equal scores keep their order. The captions of `others` come
    # before those of the split. If a wrong caption in `others` has the same text as the
    # relevant caption, the wrong caption is therefore ranked first. In this way, equal
    # texts cannot raise the recall.
    split_captions = set(zip(split.caption_rows.tolist(), split.captions, strict=True))
    added = [
        (caption, int(row))
        for item, row in zip(others, rows, strict=True)
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


@dataclass(frozen=True)
class TokenSource:
    """Reads the tokens of one precision, or converts tokens to this precision.

    Attributes:
        store: the stored tokens that are read.
        codec: codec of the precision. If `store` has another precision, its tokens are
            converted in memory.
    """

    store: TokenStore
    codec: Codec

    @property
    def simulated_from(self) -> str | None:
        """Stored precision whose tokens are converted in memory; None if the tokens
        need no conversion.
        """
        return None if self.store.precision == self.codec.name else self.store.precision

    def fetch(self, rows: Ints) -> Blocks:
        """Return the blocks of `rows` [k], bfloat16 [k, m, d]. A row id may occur
        several times.
        """
        distinct, which = np.unique(rows, return_inverse=True)
        blocks = self.store.fetch(distinct)
        if self.simulated_from is not None:
            blocks = self.codec.decode(self.codec.encode(blocks))
        return blocks[which]


def token_sources(index: CommittedIndex, names: Sequence[str]) -> list[TokenSource]:
    """Return the token sources of the stored precision of the highest fidelity, which
    is the reference, and of the precisions `names`. The highest-fidelity one is first.

    For a precision that is not stored, tokens of the stored precision of the highest
    fidelity are converted in memory, as `quantize` would convert them.

    Args:
        names: precisions; empty for all precisions of the index.

    Raises:
        UsageError: a precision is unknown, or has a higher fidelity than the stored
            ones.
    """
    spec = index.manifest.spec
    held = codec(finest(spec.precisions), spec.block_shape)
    requested = list(dict.fromkeys([held.name, *(names or spec.precisions)]))
    missing = [name for name in requested if name not in spec.precisions]
    for name in missing:
        if codec(name, spec.block_shape).record_bytes > held.record_bytes:
            raise UsageError(
                f"the precision '{name}' cannot be simulated from {index.root}, because"
                f" the most accurate stored precision is {held.name}; choose a less"
                " accurate precision"
            )
    # `offset` is the offset block that `quantize` would subtract from each block before
    # the conversion. `block` names the precisions for which it would do this.
    offset = block = None
    if missing:
        offset, block = choose_offset(index, held.name, missing)
    sources = []
    for name in requested:
        is_converted = name in missing
        has_offset = is_converted and block is not None and name in block.precisions
        store = TokenStore(index, held.name if is_converted else name)
        entry = codec(name, spec.block_shape, offset if has_offset else None)
        sources.append(TokenSource(store, entry))
    return sorted(sources, key=lambda source: -source.codec.record_bytes)


def score_pairs(
    scorer: Scorer,
    parts: Sequence[str],
    eval_set: EvaluationSet,
    nearest: Mapping[str, Pools],
    fetch: Callable[[Ints], Blocks | Tensor],
    on_progress: OnProgress,
    activity: str,
    folder: Path,
    identity: str,
) -> dict[str, dict[str, Floats]]:
    """Compute parts of the final score for the pools of both directions. A pair that
    occurs several times is scored once.

    The scores are kept in a file of `folder` until all pairs are scored, so a call
    after a stop continues.

    Args:
        parts: names in `JOINT_PARTS`.
        nearest: the pools of `eval_set` by direction.
        fetch: function that takes row ids [k], which may repeat, and returns their
            blocks [k, m, d].
        identity: text that is equal only for equal blocks and equal weights of
            `scorer`.

    Returns:
        For each direction, the values of `parts` and of the embedding similarity by
        name, float32 [q, p].
    """
    values = {
        direction: {EMBEDDING: pools.similarities}
        for direction, pools in nearest.items()
    }
    if not parts:
        return values
    keys = {}
    for direction, pools in nearest.items():
        positions, rows = eval_set.pairs(direction, pools)
        keys[direction] = (positions << _KEY_SHIFT) | rows
    distinct = np.unique(np.concatenate([each.ravel() for each in keys.values()]))
    captions = eval_set.captions
    lengths = np.array(list(map(len, scorer.joint.tokenizer.caption_ids(captions))))
    # Pairs are sorted by the length of the caption, so that captions of similar length
    # share batches. The longest captions need the most memory and time. They come
    # first, so that a lack of memory shows at once, and the estimate of the remaining
    # time is not too low.
    order = np.argsort(-lengths[distinct >> _KEY_SHIFT], kind="stable")
    named = f"{identity}\0{parts}\0{captions}".encode() + distinct.tobytes()
    path = folder / f"scores-{hashlib.sha256(named).hexdigest()[:32]}.npy"
    scores = np.full((len(parts), len(distinct)), np.nan, np.float32)
    with contextlib.suppress(OSError, ValueError):
        scores[:] = np.load(path)
    saved = time.monotonic()
    for start in range(0, len(order), CHUNK_PAIRS):
        on_progress(activity, start, len(order))
        chunk = order[start : start + CHUNK_PAIRS]
        if np.isfinite(scores[:, chunk]).all():
            continue
        texts = [captions[position] for position in distinct[chunk] >> _KEY_SHIFT]
        blocks = fetch(distinct[chunk] & ((1 << _KEY_SHIFT) - 1))
        computed = scorer.parts(parts, texts, scorer.images(blocks))
        scores[:, chunk] = [computed[part] for part in parts]
        if time.monotonic() - saved > _KEEP_SECONDS:
            # Without the file, only a stop costs more time.
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    np.save(file, scores)
            saved = time.monotonic()
    on_progress(activity, len(order), len(order))
    with contextlib.suppress(OSError):
        path.unlink()
    for direction, each in keys.items():
        positions = np.searchsorted(distinct, each)
        of_direction = scores[:, positions]
        values[direction] |= dict(zip(parts, of_direction, strict=True))
    return values
