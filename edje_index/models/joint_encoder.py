"""The joint encoder: a BERT that scores how well a caption fits an image's stored tokens.

Shape letters: b pairs, m image tokens, t tokens of a row, d the language model's width.
Names of parameters are those of published checkpoints. Beside the scoring head the language-model head
and the text-embedding head (``text_projection``) are kept: training goes on from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.bf16 import as_tensor
from edje_index.models.devices import autocast
from edje_index.models.joint_inputs import JointInputs, JointTokenizer
from edje_index.scoring.content_words import content_words
from edje_index.scoring.late_interaction import late_interaction
from edje_index.scoring.pooled_similarity import PooledSimilarity

prepare_torchvision()

from transformers import BertConfig, BertForMaskedLM  # noqa: E402
from transformers.models.bert.modeling_bert import BertPooler  # noqa: E402

Array = np.ndarray[Any, np.dtype[Any]]

SCORE_BATCH = 128  # pairs in one pass: bounds memory for pools of any size


class ScoreParts(NamedTuple):
    """Matching logits, late interaction and pooled similarity of the same pairs, float32 [b] each."""

    logits: torch.Tensor
    late: torch.Tensor
    pooled: torch.Tensor


class JointEncoder(nn.Module):
    """BERT with the ``<image>`` placeholders' embeddings replaced by stored tokens, and a head on ``[CLS]``.

    Attributes:
        tokenizer: of captions.
        late_weight: weight of the late interaction of words and tokens beside the logit, in :meth:`score`. Published
            models have none.
        compute_dtype: of the language model's matrix products in :meth:`forward`, see
            `models.devices.autocast`. The head and other parts of the score are float32: eight bits of a
            logit would make candidates equal.
        pooled: pooled similarity, where one was fitted; its weight in :meth:`score` is ``pooled_weight``.
    """

    def __init__(self, config: BertConfig, tokenizer: JointTokenizer, text_embed_dim: int) -> None:
        super().__init__()
        if tokenizer.image_token_id >= config.vocab_size:
            raise ModelError(
                f"the tokenizer's <image> token has number {tokenizer.image_token_id}, but the language model "
                f"has {config.vocab_size} words: give the tokenizer that it was trained with"
            )
        self.tokenizer = tokenizer
        self.late_weight = 0.0
        self.compute_dtype = torch.float32
        self.pooled: PooledSimilarity | None = None
        self.pooled_weight = 0.0
        self.language_model = BertForMaskedLM(config)
        # One tensor under two names, as in published checkpoints.
        self.text_embeddings = self.language_model.get_input_embeddings()
        self.classification_head = nn.Sequential(_pooler(config), nn.Linear(config.hidden_size, 1))
        self.text_projection = nn.Linear(config.hidden_size, text_embed_dim)
        self.eval()

    @property
    def config(self) -> BertConfig:
        """The language model's configuration."""
        return self.language_model.config

    @property
    def width(self) -> int:
        """d, the width that stored tokens must have."""
        return int(self.config.hidden_size)

    @torch.inference_mode()
    def score(self, captions: str | Sequence[str], tokens: torch.Tensor | Array) -> torch.Tensor:
        """Matching logits + ``late_weight`` x late interaction + ``pooled_weight`` x pooled similarity.

        float32 [b] on the CPU; higher is better.

        Args:
            captions: b captions, or one for all blocks.
            tokens: stored tokens [b, m, d] of any floating type: a tensor on any device, or an array
                (``ml_dtypes.bfloat16`` included).

        Raises:
            ModelError: another number of captions than blocks, or blocks of another width.
        """
        parts = self.parts(captions, tokens, late=bool(self.late_weight), pooled=bool(self.pooled_weight))
        return parts.logits + self.late_weight * parts.late + self.pooled_weight * parts.pooled

    @torch.inference_mode()
    def parts(
        self, captions: str | Sequence[str], tokens: torch.Tensor | Array, *, late: bool, pooled: bool
    ) -> ScoreParts:
        """What :meth:`score` adds up, each float32 [b] on the CPU; parts that are not asked for are 0."""
        tokens = as_tensor(tokens)
        captions = [captions] if isinstance(captions, str) else list(captions)
        self._check(captions, tokens)
        if len(captions) == 1:
            captions = captions * tokens.shape[0]
        found = ScoreParts(*(torch.zeros(len(captions)) for _ in ScoreParts._fields))
        for start in range(0, len(captions), SCORE_BATCH):
            rows = slice(start, start + SCORE_BATCH)
            found.logits[rows] = self(self.tokenizer.inputs(captions[rows], tokens.shape[1]), tokens[rows])
            if late:
                found.late[rows] = self.late_interaction(captions[rows], tokens[rows]).cpu()
            if pooled:
                found.pooled[rows] = self.pooled_similarity(captions[rows], tokens[rows]).cpu()
        return found

    def late_interaction(self, captions: Sequence[str], tokens: torch.Tensor) -> torch.Tensor:
        """See `scoring.late_interaction`: scores [b] of captions with tokens [b, m, d]."""
        words: torch.Tensor = self.text_embeddings.weight.detach()  # type: ignore[operator]
        ids = self.tokenizer.caption_ids(captions)
        return late_interaction(ids, tokens.to(words.device), words, self._content)

    def pooled_similarity(self, captions: Sequence[str], tokens: torch.Tensor) -> torch.Tensor:
        """See `scoring.pooled_similarity`: cosines [b] of captions with tokens [b, m, d]; 0 without ``pooled``.

        A caption that comes again costs nothing.
        """
        places = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
        described = self.caption_vectors(list(places))
        asked = described[torch.tensor([places[caption] for caption in captions], device=described.device)]
        return (asked * self.image_vectors(tokens)).sum(dim=1)

    @torch.inference_mode()
    def caption_vectors(self, captions: Sequence[str]) -> torch.Tensor:
        """Unit vectors [b, k] of captions in the space of the pooled similarity; without it k is 0."""
        if self.pooled is None:
            return torch.zeros(len(captions), 0, device=self.text_projection.weight.device)
        found = []
        for start in range(0, len(captions), SCORE_BATCH) or [0]:
            some = captions[start : start + SCORE_BATCH]
            sentences = self.sentence_vectors(self.tokenizer.inputs(some, 0))
            found.append(self.pooled.captions(self.tokenizer.caption_ids(some), sentences))
        return torch.cat(found)

    @torch.inference_mode()
    def image_vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors [b, k] of image tokens [b, m, d] in that space."""
        device = self.text_projection.weight.device
        if self.pooled is None:
            return torch.zeros(len(tokens), 0, device=device)
        starts = range(0, len(tokens), SCORE_BATCH) or [0]
        return torch.cat([self.pooled.images(tokens[start : start + SCORE_BATCH].to(device)) for start in starts])

    @torch.inference_mode()
    def sentence_vectors(self, inputs: JointInputs) -> torch.Tensor:
        """Mean last hidden state, float32 [b, d], of rows without image tokens."""
        mask = inputs.attention_mask.to(self.text_projection.weight.device)[:, :, None]
        hidden = self.hidden_states(inputs, torch.empty(0, 0, self.width)).float()
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    @cached_property
    def _content(self) -> NDArray[np.bool_]:
        return content_words(self.tokenizer)

    def forward(self, inputs: JointInputs, tokens: torch.Tensor) -> torch.Tensor:
        """Matching logits, float32 [b], of prepared rows and their image tokens [b, m, d]."""
        with autocast(self.compute_dtype, self.text_projection.weight.device):
            hidden = self.hidden_states(inputs, tokens)
        logits: torch.Tensor = self.classification_head(hidden.float())
        return logits[:, 0].float()  # within a training's autocast they are not

    def hidden_states(self, inputs: JointInputs, tokens: torch.Tensor) -> torch.Tensor:
        """Last hidden states [b, t, d] of the language model."""
        device = self.text_projection.weight.device
        ids = inputs.input_ids.to(device)
        words = self.text_embeddings(ids)
        is_image = (ids == self.tokenizer.image_token_id)[:, :, None].expand_as(words)
        embedded = words.masked_scatter(is_image, tokens.to(device, words.dtype))
        output = self.language_model.bert(
            inputs_embeds=embedded,
            token_type_ids=inputs.token_type_ids.to(device),
            attention_mask=inputs.attention_mask.to(device),
            position_ids=self._positions(ids),
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """0, 1, 2, ...; beyond the table of positions, its last one again (as published models extend it)."""
        table = self.language_model.bert.embeddings.position_embeddings.num_embeddings
        return torch.arange(ids.shape[1], device=ids.device).clamp(max=table - 1)[None]

    def _check(self, captions: list[str], tokens: torch.Tensor) -> None:
        if tokens.ndim != 3 or tokens.shape[2] != self.width:
            raise ModelError(f"the joint encoder scores blocks [b, m, {self.width}], not {list(tokens.shape)}")
        if len(captions) not in (1, tokens.shape[0]):
            raise ModelError(f"{len(captions)} captions for {tokens.shape[0]} blocks: give one, or one each")


def _pooler(config: BertConfig) -> nn.Module:
    pooler: nn.Module = BertPooler(config)  # type: ignore[no-untyped-call]
    return pooler


def bert_config(source: Path | dict[str, Any], **overrides: int) -> BertConfig:
    """A BERT configuration from ``config.json`` (or its content), with some values replaced.

    Raises:
        ModelError: no such file, or not of the BERT family.
    """
    try:
        values = json.loads(source.read_text()) if isinstance(source, Path) else dict(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the language model's configuration {source}: {error}") from error
    if values.get("model_type", "bert") != "bert":
        raise ModelError(f"the joint encoder is of the BERT family, not {values['model_type']!r}")
    try:
        return BertConfig.from_dict({**values, **overrides})
    except Exception as error:
        raise ModelError(f"the language model's configuration {source} is not valid: {error}") from error
