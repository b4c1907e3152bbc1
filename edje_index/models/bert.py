"""A BERT encoder for inference. It does not use transformers, because importing
transformers takes two seconds.

The weights have the same names as in `BertModel` of transformers. The results equal
those of `BertModel` up to rounding.

Shape letters: b rows, t tokens per row, d width of the model, h heads, c width of a
head, v size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.adapter import activation
from edje_index.models.devices import fused_on_cuda
from edje_index.models.linear import Linear
from storage_formats.atomic import Json

# Smallest number of values in the hidden states of a batch for which a fused kernel is
# used. About 250 pairs of a caption and an image have this number of values.
_FUSED_VALUES = 1 << 23


def check_bert(config: Json, source: str) -> None:
    """Raise ModelError if `config`, a configuration in the format of transformers, does
    not describe a BERT encoder.

    `source` names the configuration in error messages.
    """
    if config.get("model_type", "bert") != "bert":
        raise ModelError(
            f"{source} describes a model of type {config['model_type']!r}: give a BERT"
            " model"
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ModelError(
            f"{source} describes a decoder: give a BERT encoder, without is_decoder and"
            " cross-attention"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(
            f"{source} has the position_embedding_type"
            f" {config['position_embedding_type']!r}: give a BERT model with the type"
            " 'absolute'"
        )


@dataclass(frozen=True)
class BertWeights:
    """The weights of a BERT model. All methods raise ModelError if a tensor is missing
    or has another shape than expected.

    Args:
        prefix: prefix of the names in `tensors`. The methods of this class take names
            without this prefix.
        source: name of the weights in error messages.
    """

    tensors: Mapping[str, Tensor]
    prefix: str
    source: str = field(kw_only=True)
    device: torch.device = field(kw_only=True)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the tensor `name` of the given `shape`, float32 on `device`. A size of
        -1 in `shape` matches any size.
        """
        tensor = self.tensors.get(self.prefix + name)
        sizes = [] if tensor is None else list(tensor.shape)
        if (
            tensor is None
            or len(sizes) != len(shape)
            or any(a not in (b, -1) for a, b in zip(shape, sizes, strict=True))
        ):
            problem = "missing" if tensor is None else f"of the shape {sizes}"
            raise ModelError(
                f"{self.source} does not fit the configuration of the model: the"
                f" tensor {self.prefix + name} of the shape {list(shape)} is {problem};"
                " give weights and a configuration of the same model"
            )
        return tensor.detach().to(self.device, torch.float32)

    def linear(
        self,
        names: Sequence[str],
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Linear:
        """Stack the linear layers `names`, each with weights [rows, columns], into
        one linear layer.
        """
        weights = [self.take(f"{name}.weight", rows, columns) for name in names]
        biases = [self.take(f"{name}.bias", rows) for name in names]
        return Linear(torch.cat(weights).to(dtype), torch.cat(biases).to(dtype))

    def norm(self, name: str, width: int, eps: float) -> nn.LayerNorm:
        """Return the layer norm `name` for vectors of length `width`."""
        norm = nn.LayerNorm(width, eps, device="meta")
        norm.weight = nn.Parameter(
            self.take(f"{name}.weight", width), requires_grad=False
        )
        norm.bias = nn.Parameter(self.take(f"{name}.bias", width), requires_grad=False)
        return norm


class Bert:
    """The embeddings and layers of a BERT model.

    Args:
        dtype: data type of matrix products. Residual sums and layer norms always use
            float32.

    Attributes:
        words: word embeddings, float32 [v, d].
    """

    def __init__(
        self,
        config: Json,
        weights: BertWeights,
        *,
        source: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_bert(config, source)
        try:
            layers = int(config["num_hidden_layers"])
            heads = int(config["num_attention_heads"])
            activation_name = str(config["hidden_act"])
            eps = float(config.get("layer_norm_eps", 1e-12))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"the configuration {source} of the language model is not valid:"
                f" {error!r}; restore this file"
            ) from error
        self.words = weights.take("embeddings.word_embeddings.weight", -1, -1)
        self.width = self.words.shape[1]
        if layers < 1 or heads < 1 or self.width % heads:
            raise ModelError(
                f"{source} has {layers} layers and {heads} heads, but a BERT model has"
                f" at least one layer, and its width, {self.width}, is divisible by the"
                " number of heads: give another model"
            )
        self._positions = weights.take(
            "embeddings.position_embeddings.weight", -1, self.width
        )
        self._types = weights.take(
            "embeddings.token_type_embeddings.weight", -1, self.width
        )
        self._norm = weights.norm("embeddings.LayerNorm", self.width, eps)
        self._dtype = dtype
        act = activation(activation_name)
        self._layers = [
            _Layer(
                weights,
                f"encoder.layer.{index}.",
                self.width,
                heads,
                act,
                eps,
                dtype,
                last=index == layers - 1,
            )
            for index in range(layers)
        ]

    def embed(
        self,
        words: Tensor,
        token_types: Tensor,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the first layer, float32 [b, t, d].

        Args:
            words: word embeddings of the tokens [b, t, d]. For image tokens, these are
                the stored tokens of the image.
            token_types: token type of each token, int64 [b, t] or [1, t].
            positions: position of each token, int64 [b, t]; None for the positions 0 to
                t - 1 in every row.
        """
        if positions is None:
            positions = torch.arange(words.shape[1], device=words.device)
        # Positions beyond the position table have the embedding of its last position,
        # as in published models.
        last = len(self._positions) - 1
        embedded: Tensor = self._norm(
            words
            + functional.embedding(token_types, self._types)
            + self._positions[positions.clamp(max=last)]
        )
        return embedded

    def hidden_states(
        self, embedded: Tensor, mask: Tensor | None, outputs: int | None = None
    ) -> Tensor:
        """Return the last hidden states of the result of `embed`, float32 [b, t, d].

        Args:
            mask: False for padding, bool [b, t]. None if there is no padding, which is
                faster.
            outputs: compute the states of only the first `outputs` tokens; None for all
                tokens.
        """
        states = embedded, embedded.to(self._dtype)
        for layer in self._layers[:-1]:
            states = layer(*states, mask)
        return self._layers[-1](*states, mask, outputs)[0]

    def sentence_vectors(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of the last hidden states of each row, float32 [b, d].

        Args:
            ids: token ids, int64 [b, t].
            types: token type of each token, int64 [b, t].
            mask: False for padding, bool [b, t].
        """
        embedded = self.embed(functional.embedding(ids, self.words), types)
        hidden = self.hidden_states(embedded, None if bool(mask.all()) else mask)
        return (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


class _Layer:
    """One layer of a BERT model. Except in the last layer, queries, keys and values are
    computed in one matrix product, which is faster than three. Layers pass on their
    states both in float32 and in the data type of matrix products.
    """

    def __init__(
        self,
        weights: BertWeights,
        name: str,
        width: int,
        heads: int,
        act: nn.Module,
        eps: float,
        dtype: torch.dtype,
        *,
        last: bool,
    ) -> None:
        query, *others = (
            f"{name}attention.self.{part}" for part in ("query", "key", "value")
        )
        wide = len(weights.take(f"{name}intermediate.dense.bias", -1))
        self._heads = heads
        self._activation = act
        # The last layer has a separate query projection, which can be computed for the
        # first `outputs` tokens only.
        self._query = (
            weights.linear([query], width, width, dtype=dtype) if last else None
        )
        self._key_value = weights.linear(
            others if last else [query, *others], width, width, dtype=dtype
        )
        self._output = weights.linear(
            [f"{name}attention.output.dense"], width, width, dtype=dtype
        )
        self._output_norm = weights.norm(
            f"{name}attention.output.LayerNorm", width, eps
        )
        self._first = weights.linear(
            [f"{name}intermediate.dense"], wide, width, dtype=dtype
        )
        self._second = weights.linear([f"{name}output.dense"], width, wide, dtype=dtype)
        self._feed_forward_norm = weights.norm(f"{name}output.LayerNorm", width, eps)

    def __call__(
        self,
        x: Tensor,
        low: Tensor,
        mask: Tensor | None,
        outputs: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output states of this layer for the first `outputs` tokens, or for
        all tokens if `outputs` is None: a pair (states in float32, the same states in
        the data type of matrix products).

        Args:
            x: states in float32 [b, t, d].
            low: the same states in the data type of matrix products.
        """
        if self._query is None:
            query, key, value = self._key_value(low).chunk(3, dim=2)
            query = query[:, :outputs]
        else:
            query = self._query(low[:, :outputs])
            key, value = self._key_value(low).chunk(2, dim=2)
        # [b, t, d] -> [b, h, t, c]
        query, key, value = (
            part.view(*part.shape[:2], self._heads, -1).transpose(1, 2)
            for part in (query, key, value)
        )
        attended = _attention(
            query, key, value, None if mask is None else mask[:, None, None, :]
        )
        attended = self._output(attended.transpose(1, 2).flatten(2))
        x, low = _add_and_normalize(x[:, :outputs], attended, self._output_norm)
        fed_forward = self._second(self._activation(self._first(low)))
        return _add_and_normalize(x, fed_forward, self._feed_forward_norm)


def _add_and_normalize(
    x: Tensor, change: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of `x` + `change` twice: in the data type of `x`, and in
    the data type of `change`.
    """
    # The axes of batch and tokens are joined to one axis, so that one compiled kernel
    # fits all batch sizes and caption lengths.
    rows, low = _sum_and_norm(
        x.flatten(0, 1), change.flatten(0, 1), norm.weight, norm.bias, norm.eps
    )
    return rows.view(change.shape), low.view(change.shape)


@fused_on_cuda(lambda x: x.numel() >= _FUSED_VALUES, dynamic=True)
def _sum_and_norm(
    x: Tensor,
    change: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    normed = functional.layer_norm(x + change, weight.shape, weight, bias, eps)
    return normed, normed.to(change.dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    """Return the attention of each head, [b, h, outputs, c]. `allowed` is bool and
    broadcasts to [b, h, outputs, t].
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed
        )
    # For the short rows of a joint encoder, torch's bfloat16 attention for CPUs takes
    # twice as long as these products.
    scores: Tensor = (query @ key.transpose(2, 3)).float() * query.shape[3] ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=3).to(value.dtype) @ value
