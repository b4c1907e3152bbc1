"""The embeddings, tokens and queries that every system gets.

A model bundle computes the vectors for late interaction. It subtracts the mean word vector from the image tokens and
from the word vectors, and scales all vectors to unit length. The exact score of an image is the MaxSim between the
tokens of the image and the content words of the caption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edje_index.captions.matching import NAME_COLUMNS, match_items
from edje_index.captions.reading import read_captions
from edje_index.models.joint_scorer import JointScorer
from edje_index.scoring.parts import content_token_mask
from edje_index.search.late_interaction_search import max_sim
from edje_index.search.token_index import TokenIndex
from storage_formats.codecs import Blocks
from storage_formats.errors import UsageError
from storage_formats.format.rows import read_all_rows
from storage_formats.format.tombstones import live_rows
from storage_formats.reading.embeddings import read_embeddings

_CHUNK = 256
Floats = NDArray[np.float32]


Query: TypeAlias = tuple[str, int]
"""A caption, and the row id of its image."""


def sample_queries(index: TokenIndex, captions: Path, images: Path | None, count: int, seed: int) -> list[Query]:
    """Return `count` random captions of images in the index."""
    items = read_captions(captions, images)
    items, rows = match_items(index.root, read_all_rows(index.committed, NAME_COLUMNS), items).indexed(items)
    every = [(text, int(row)) for item, row in zip(items, rows, strict=True) for text in item.captions]
    chosen = np.random.default_rng(seed).permutation(len(every))[:count]
    return [every[position] for position in chosen]


@dataclass(frozen=True)
class VectorQuery:
    """A query as every system gets it.

    Attributes:
        text: the caption.
        embedding: embedding of the caption, float32 [e].
        words: vectors of the content words of the caption, float32 [w, d].
        relevant: position of the caption's image in the collection.
    """

    text: str
    embedding: Floats
    words: Floats
    relevant: int


@dataclass(frozen=True)
class Collection:
    """The vectors of n images.

    Attributes:
        tokens: tokens of each image, bfloat16 [n, m, d], mapped into memory.
        embeddings: embedding of each image, float32 [n, e].
        row_ids: row id of each image in the index that the vectors come from, int64 [n].
        queries: the queries.
    """

    tokens: Blocks
    embeddings: Floats
    row_ids: NDArray[np.int64]
    queries: list[VectorQuery]

    @classmethod
    def open(cls, folder: Path) -> Collection:
        """Open a collection that `write_collection` wrote."""
        bits = np.load(folder / "tokens.npy", mmap_mode="r")
        words = np.load(folder / "words.npy")
        embeddings = np.load(folder / "query_embeddings.npy")
        queries = [
            VectorQuery(query["text"], embedding, words[query["start"] : query["end"]], query["relevant"])
            for query, embedding in zip(json.loads((folder / "queries.json").read_text()), embeddings, strict=True)
        ]
        tokens = bits.view(ml_dtypes.bfloat16)
        return cls(tokens, np.load(folder / "embeddings.npy"), np.load(folder / "row_ids.npy"), queries)

    def chunks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield (positions, float32 tokens) of a few images at a time."""
        for start in range(0, len(self.tokens), _CHUNK):
            positions = slice(start, start + _CHUNK)
            yield positions, self.tokens[positions].astype(np.float32)

    def exact(self, k: int) -> list[list[int]]:
        """Return the positions of the `k` images with the highest MaxSim for each query, best first."""
        scores = np.empty((len(self.queries), len(self.tokens)), dtype=np.float32)
        for positions, tokens in self.chunks():
            for row, query in zip(scores, self.queries, strict=True):
                row[positions] = max_sim(query.words, tokens)
        best: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
        return best


def write_collection(folder: Path, index: TokenIndex, queries: Sequence[Query]) -> None:
    """Write the vectors of every image in `index`, and of `queries`. Queries without a content word are left out.

    Raises:
        UsageError: no query has a content word.
    """
    row_ids = live_rows(index.committed)
    embeddings = read_embeddings(index.committed, row_ids)
    present = ~np.isnan(embeddings).any(axis=1)
    row_ids, embeddings = row_ids[present], embeddings[present]
    joint, shape = index.model.joint, (len(row_ids), *index.manifest.spec.block_shape)
    bits = np.lib.format.open_memmap(folder / "tokens.npy", mode="w+", dtype=np.uint16, shape=shape)
    for start in range(0, len(row_ids), _CHUNK):
        blocks = torch.from_numpy(index.fetch_blocks(row_ids[start : start + _CHUNK].tolist()).astype(np.float32))
        bits[start : start + _CHUNK] = _unit(blocks, joint).astype(ml_dtypes.bfloat16).view(np.uint16)
    bits.flush()
    np.save(folder / "embeddings.npy", embeddings)
    np.save(folder / "row_ids.npy", row_ids)
    positions = {int(row): position for position, row in enumerate(row_ids)}
    content = content_token_mask(joint.tokenizer)
    words: list[Floats] = []
    described: list[dict[str, Any]] = []
    all_ids = joint.tokenizer.caption_ids([text for text, _ in queries])
    for (text, row_id), ids in zip(queries, all_ids, strict=True):
        kept = [token_id for token_id in ids if content[token_id]]
        if kept and row_id in positions:
            start = described[-1]["end"] if described else 0
            words.append(_unit(joint.word_vectors[kept], joint))
            described.append({"text": text, "start": start, "end": start + len(kept), "relevant": positions[row_id]})
    if not described:
        raise UsageError("no query has a content word; give other captions")
    np.save(folder / "words.npy", np.concatenate(words))
    np.save(folder / "query_embeddings.npy", index.model.text.encode([query["text"] for query in described]))
    (folder / "queries.json").write_text(json.dumps(described))


def _unit(vectors: torch.Tensor, joint: JointScorer) -> Floats:
    unit: Floats = functional.normalize(vectors.cpu() - joint.mean_word_vector.cpu(), dim=-1).numpy()
    return unit
