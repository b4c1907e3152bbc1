"""Scores pairs of a caption and an image with the weights of a joint encoder.

Shape letters: b pairs, m image tokens, t tokens per row, d width of the language model,
v size of its vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.bert import Bert, BertWeights
from edje_index.models.cuda_graph import CudaGraphs, Tensors
from edje_index.models.devices import as_tensor, inference
from edje_index.models.joint_inputs import (
    NUM_SPECIAL_TOKENS,
    JointInputs,
    JointTokenizer,
)
from storage_formats.arrays import Array, Ints
from storage_formats.atomic import Json

# pairs per batch on a GPU
_BATCH = 1024
# Pairs per batch on a CPU. The hidden states and tokens of such a batch stay in the
# cache of the CPU.
_CPU_BATCH = 32
# Largest number of pairs that are scored with a CUDA graph. For more pairs, the kernels
# run longer than Python takes to start them, so a graph saves no time.
_GRAPHED = 512
_BERT = "language_model.bert."


class JointScorer:
    """A joint encoder that scores pairs but cannot be trained. Thread-safe.

    Attributes:
        compute_dtype: data type of matrix products. The scoring head always uses
            float32, because bfloat16 logits are often equal.
    """

    def __init__(
        self,
        tokenizer: JointTokenizer,
        config: Json,
        tensors: Mapping[str, Tensor],
        *,
        source: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Build a scorer.

        Args:
            config: BERT configuration of the language model, in the format of
                transformers.
            tensors: weights by name, as in published checkpoints. The scorer may share
                their memory.
        """
        self.tokenizer = tokenizer
        self.compute_dtype = dtype
        self.device = device or torch.device("cpu")
        weights = BertWeights(tensors, _BERT, source=source, device=self.device)
        self._make_bert = partial(Bert, config, weights, source=source)
        self._bert = self._make_bert(dtype=dtype)
        tokenizer.check_fits(len(self._bert.words))
        head = replace(weights, prefix="classification_head.")
        self._pooler = head.linear(["0.dense"], self.width, self.width)
        self._head = head.linear(["1"], 1, self.width)
        # Most programs score few captions, so most shapes of inputs occur only once. A
        # shape is recorded when it occurs for the second time.
        self._graphs = CudaGraphs(self._logits, self.device, records_at=2)

    @property
    def width(self) -> int:
        """Width of the language model and of the stored tokens, d."""
        return self._bert.width

    @property
    def batch(self) -> int:
        """Number of pairs to score in one batch. A limit is needed, because pools may
        have any size.
        """
        return _CPU_BATCH if self.device.type == "cpu" else _BATCH

    @property
    def word_vectors(self) -> Tensor:
        """Word embeddings of the language model, float32 [v, d]."""
        return self._bert.words

    @cached_property
    def mean_word_vector(self) -> Tensor:
        """The mean of `word_vectors`, float32 [d]."""
        return self.word_vectors.mean(dim=0)

    @inference()
    def score(self, captions: str | Sequence[str], tokens: Tensor | Array) -> Tensor:
        """Return matching logits, see `JointEncoder.score`."""
        tokens = as_tensor(tokens)
        captions = [captions] if isinstance(captions, str) else list(captions)
        if tokens.ndim != 3 or tokens.shape[2] != self.width:
            raise ModelError(
                f"blocks must have the shape [b, m, {self.width}], got"
                f" {list(tokens.shape)}"
            )
        if len(captions) not in (1, tokens.shape[0]):
            raise ModelError(
                f"got {len(captions)} captions for {tokens.shape[0]} blocks: give one"
                " caption, or one caption per block"
            )
        if len(set(captions)) == 1:
            captions = captions[:1]
        if not len(tokens):
            return torch.empty(0, dtype=torch.float32)
        ids = self.tokenizer.caption_ids(captions)
        if len(ids) == 1:
            row = self._word_ids(ids)
            logits = [
                self.logits(row, batch) for batch in torch.split(tokens, self.batch)
            ]
            return torch.cat(logits).cpu()
        # A copy between CPU and device waits until the device has finished its work.
        # Captions are therefore copied before the first batch, and logits are copied
        # after the last batch.
        lengths = np.array([len(caption) for caption in ids])
        order = np.argsort(lengths, kind="stable")
        lengths = lengths[order]
        rows = self._word_ids([ids[pair] for pair in order])
        lengths_on_device = torch.from_numpy(lengths).to(self.device)
        pairs = torch.from_numpy(order)
        images = pairs.to(tokens.device)
        logits = []
        for batch in self._batches(lengths):
            shortest, longest = lengths[[batch.start, batch.stop - 1]]
            texts = rows[batch, : int(longest) + NUM_SPECIAL_TOKENS]
            batch_lengths = lengths_on_device[batch] if shortest < longest else None
            logits.append(self.logits(texts, tokens[images[batch]], batch_lengths))
        result = torch.empty(len(tokens), dtype=torch.float32)
        result[pairs] = torch.cat(logits).cpu()
        return result

    def _batches(self, lengths: Ints) -> Iterator[slice]:
        """Yield batches of captions as slices. The captions must be sorted by length,
        so that `lengths` ascends.
        """
        starts = {*range(0, len(lengths), self.batch)}
        if self.device.type == "cpu":
            # On a CPU, the captions of a batch have equal lengths, so that they need no
            # padding and no mask. On a GPU, padding takes less time than the start of
            # the kernels of more batches.
            firsts = np.unique(lengths, return_index=True)[1].tolist()
            starts = {
                start
                for first, end in itertools.pairwise([*firsts, len(lengths)])
                for start in range(first, end, self.batch)
            }
        for start, stop in itertools.pairwise([*sorted(starts), len(lengths)]):
            yield slice(start, stop)

    def _word_ids(self, captions: Sequence[Sequence[int]]) -> Tensor:
        """Return the input rows of captions, without image tokens, int64 [n, t] on the
        device. Shorter rows have padding at the end.
        """
        return self.tokenizer.inputs_of_ids(captions, 0).input_ids.to(self.device)

    @inference()
    def logits(
        self,
        word_ids: Tensor,
        tokens: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return one matching logit per pair, float32 [b], on the device.

        Args:
            word_ids: input rows of b captions, or of one caption for all pairs,
                without image tokens, int64 [b, t] or [1, t] on the device. The last row
                must be the longest, without padding.
            tokens: image tokens of the pairs [b, m, d].
            lengths: number of tokens of each caption, int64 [b] on the device; None if
                no row has padding.
        """
        inputs = [word_ids, tokens]
        if lengths is not None:
            inputs.append(lengths)
        if len(tokens) > _GRAPHED:
            return self._logits(*inputs)[0]
        return self._graphs(*inputs)[0]

    def _logits(
        self,
        word_ids: Tensor,
        tokens: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensors:
        image = tokens.to(self.device).float()
        rows = functional.embedding(word_ids, self.word_vectors)
        rows = rows.expand(len(image), -1, -1)
        # The last row has no padding, so its last token is the second [SEP].
        separator = rows[-1:, -1:].expand(len(image), -1, -1)
        words = torch.cat([rows[:, :-1], image, separator], dim=1)
        column = torch.arange(words.shape[1], device=self.device)
        image_start = word_ids.shape[1] - 1
        # The image tokens and the second [SEP] after them have token type 1.
        types = (column >= image_start).long()[None]
        mask = None
        positions = None
        if lengths is not None:
            # In a shorter row, the columns between the first [SEP] and the image tokens
            # are padding. They are masked, and get no positions of their own.
            mask = (column < lengths[:, None] + 2) | (column >= image_start)
            positions = mask.cumsum(dim=1) - 1
        embedded = self._bert.embed(words, types, positions)
        first = self._bert.hidden_states(embedded, mask, outputs=1)[:, 0]
        logits = self._head(torch.tanh(self._pooler(first)))
        return (logits[:, 0],)

    @inference()
    def sentence_vectors(self, inputs: JointInputs) -> Tensor:
        """Return the mean of the last hidden states of each row, float32 [b, d].
        Rows must not contain image tokens.
        """
        return self._exact_bert.sentence_vectors(
            inputs.input_ids.to(self.device),
            inputs.token_type_ids.to(self.device),
            inputs.attention_mask.to(self.device).bool(),
        )

    @cached_property
    def _exact_bert(self) -> Bert:
        return self._bert if self.compute_dtype == torch.float32 else self._make_bert()
