"""The joint encoder, a BERT model that scores how well a caption matches the stored
tokens of an image.

Shape letters: b pairs, m image tokens, t tokens per row, d width of the language model.
Parameters have the same names as in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.bert import check_bert
from edje_index.models.devices import autocast
from edje_index.models.joint_inputs import JointInputs, JointTokenizer
from edje_index.models.joint_scorer import JointScorer
from edje_index.models.safety import read_configuration
from storage_formats.arrays import Array
from storage_formats.atomic import Json

prepare_torchvision()

from transformers import BertConfig, BertForMaskedLM  # noqa: E402
from transformers.models.bert.modeling_bert import BertPooler  # noqa: E402


class JointEncoder(nn.Module):
    """A BERT model with a scoring head on ``[CLS]``.

    The input contains ``<image>`` placeholders. The stored tokens of an image replace
    the embeddings of the placeholders.

    Attributes:
        tokenizer: tokenizer of the captions.
        compute_dtype: data type of matrix products in :meth:`forward` and
            :meth:`score`.

    Examples:
        >>> from edje_index import ModelBundle, TokenStore
        >>> joint = ModelBundle.load("model").joint
        >>> joint.score("a dog", TokenStore.open("photos.edje").fetch([0, 1, 2])).shape
        torch.Size([3])
    """

    def __init__(
        self, config: BertConfig, tokenizer: JointTokenizer, text_embed_dim: int
    ) -> None:
        super().__init__()
        tokenizer.check_fits(config.vocab_size)
        self.tokenizer = tokenizer
        self.compute_dtype = torch.float32
        self.language_model = BertForMaskedLM(config)
        # The word embeddings have a second name, as in published checkpoints.
        self.text_embeddings = self.language_model.get_input_embeddings()
        pooler: nn.Module = BertPooler(config)  # type: ignore[no-untyped-call]
        self.classification_head = nn.Sequential(
            pooler, nn.Linear(config.hidden_size, 1)
        )
        self.text_projection = nn.Linear(config.hidden_size, text_embed_dim)
        self.eval()

    @property
    def config(self) -> BertConfig:
        """Configuration of the language model."""
        return self.language_model.config

    @property
    def width(self) -> int:
        """Width of the language model and of the stored tokens, d."""
        return int(self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.text_projection.weight.device

    def scorer(self) -> JointScorer:
        """Return a scorer with the current weights. A scorer is faster than
        :meth:`forward`, but cannot be trained.
        """
        return JointScorer(
            self.tokenizer,
            self.config.to_dict(),
            self.state_dict(),
            source="the joint encoder",
            dtype=self.compute_dtype,
            device=self.device,
        )

    def score(self, captions: str | Sequence[str], tokens: Tensor | Array) -> Tensor:
        """Return matching logits, float32 [b] on the CPU. A higher logit means a better
        match.

        Args:
            captions: b captions, or one caption for all b blocks.
            tokens: stored tokens [b, m, d], a tensor or NumPy array of any floating
                type.

        Raises:
            ModelError: the number of captions is neither 1 nor b, or the width of
                `tokens` is not d.
        """
        return self.scorer().score(captions, tokens)

    def forward(self, inputs: JointInputs, tokens: Tensor) -> Tensor:
        """Return one matching logit per input row, float32 [b].

        `tokens` [b, m, d] are the image tokens of the rows.
        """
        with autocast(self.compute_dtype, self.device):
            hidden = self.hidden_states(inputs, tokens)
        logits: Tensor = self.classification_head(hidden.float())
        # Under the autocast of a training run, the logits may be bfloat16.
        return logits[:, 0].float()

    def hidden_states(self, inputs: JointInputs, tokens: Tensor) -> Tensor:
        """Return the last hidden states of the input rows [b, t, d].

        `tokens` [b, m, d] are the image tokens of the rows.
        """
        device = self.device
        ids = inputs.input_ids.to(device)
        words = self.text_embeddings(ids)
        is_image = (ids == self.tokenizer.image_token_id)[:, :, None].expand_as(words)
        embedded = words.masked_scatter(is_image, tokens.to(device, words.dtype))
        positions = (
            self.language_model.bert.embeddings.position_embeddings.num_embeddings
        )
        output = self.language_model.bert(
            inputs_embeds=embedded,
            token_type_ids=inputs.token_type_ids.to(device),
            attention_mask=inputs.attention_mask.to(device),
            # Positions beyond the position table are replaced by its last position.
            position_ids=torch.arange(ids.shape[1], device=device).clamp(
                max=positions - 1
            )[None],
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def bert_config(source: Path | Json, **overrides: int) -> BertConfig:
    """Return the BERT configuration in `source`, the path of a file ``config.json`` or
    its content. `overrides` replace values of the configuration.

    Raises:
        ModelError: `source` is not a valid configuration of a BERT encoder.
    """
    values = read_configuration(source) if isinstance(source, Path) else source
    check_bert(values, str(source) if isinstance(source, Path) else "the joint encoder")
    try:
        return BertConfig.from_dict({**values, **overrides})
    except Exception as error:
        raise ModelError(
            f"the configuration {source} of the language model is not valid: {error};"
            " restore this file"
        ) from error
