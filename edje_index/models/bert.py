"""A BERT encoder for inference. It does not use transformers, because importing transformers takes two seconds.

The weights have the same names as in `BertModel` of transformers. Results are equal up to rounding.

Shape letters: b rows, t tokens per row, d width of the model, h heads, c width of a head, v size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models.adapter import activation
from edje_index.models.linear import Linear


@dataclass(frozen=True)
class BertShape:
    """The settings of a BERT model that the shapes of the weights do not show.

    Attributes:
        layers: number of layers.
        heads: number of attention heads.
        activation: name of the activation of the feed-forward layers in transformers.
        eps: epsilon of the layer norms.
    """

    layers: int
    heads: int
    activation: str
    eps: float

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str) -> BertShape:
        """Read the settings from `config`, a BERT configuration in the format of transformers.

        `source` names the configuration in error messages.
        """
        if config.get("model_type", "bert") != "bert":
            raise ModelError(f"{source} describes a model of type {config['model_type']!r}: give a BERT model")
        if config.get("is_decoder") or config.get("add_cross_attention"):
            raise ModelError(
                f"{source} describes a decoder: give a BERT encoder, without is_decoder and cross-attention"
            )
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ModelError(
                f"{source} has the position_embedding_type {config['position_embedding_type']!r}: give a BERT "
                "model with the type 'absolute'"
            )
        try:
            layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            shape = cls(layers, heads, str(config["hidden_act"]), float(config.get("layer_norm_eps", 1e-12)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"the configuration {source} of the language model is not valid: {error!r}; restore this file"
            ) from error
        if shape.layers < 1 or shape.heads < 1:
            raise ModelError(f"{source} must have at least one layer and one head, got {layers} and {heads}")
        return shape


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer. Queries, keys and values share one matrix product, because this is faster."""

    query: Linear | None  # None: the query projection is part of `key_value`, before the keys
    key_value: Linear
    output: Linear
    output_norm: nn.LayerNorm
    feed_forward: tuple[Linear, Linear]
    feed_forward_norm: nn.LayerNorm


class BertWeights:
    """The weights of a BERT model. Names and shapes are checked.

    Args:
        tensors: all tensors by name.
        prefix: prefix of the names in `tensors`. The rest of each name is a name in `BertModel`.
        source: file or model that the tensors come from, for error messages.
        device: device of the returned tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str, *, source: str, device: torch.device) -> None:
        self._tensors, self._prefix, self._source, self._device = tensors, prefix, source, device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor `name`, float32. A size of -1 in `shape` matches any size."""
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(
                f"{self._source} does not fit the configuration of the model: the tensor "
                f"{self._prefix + name} is missing; give weights and a configuration of the same model"
            )
        if len(tensor.shape) != len(shape) or any(
            size not in (actual, -1) for size, actual in zip(shape, tensor.shape, strict=True)
        ):
            raise ModelError(
                f"{self._source} does not fit the configuration of the model: the tensor "
                f"{self._prefix + name} has the shape {list(tensor.shape)} instead of {list(shape)}; give "
                "weights and a configuration of the same model"
            )
        return tensor.detach().to(self._device, torch.float32)

    def linear(self, names: Sequence[str], rows: int, columns: int, *, dtype: torch.dtype = torch.float32) -> Linear:
        """Stack the linear layers `names`, each with weights [rows, columns], into one linear layer."""
        weights = [self.take(f"{name}.weight", rows, columns) for name in names]
        biases = [self.take(f"{name}.bias", rows) for name in names]
        if len(names) == 1:
            return Linear(weights[0].to(dtype), biases[0].to(dtype))
        return Linear(torch.cat(weights).to(dtype), torch.cat(biases).to(dtype))

    def norm(self, name: str, width: int, eps: float) -> nn.LayerNorm:
        """Return the layer norm `name` for vectors of length `width`."""
        norm = nn.LayerNorm(width, eps, device="meta")
        norm.weight = nn.Parameter(self.take(f"{name}.weight", width), requires_grad=False)
        norm.bias = nn.Parameter(self.take(f"{name}.bias", width), requires_grad=False)
        return norm


class Bert:
    """The embeddings and layers of a BERT model.

    Args:
        shape: settings of the model.
        weights: weights of the model.
        dtype: data type of matrix products. Residual sums and layer norms always use float32.

    Attributes:
        words: word embeddings, float32 [v, d].
    """

    def __init__(self, shape: BertShape, weights: BertWeights, dtype: torch.dtype = torch.float32) -> None:
        self.words = weights.take("embeddings.word_embeddings.weight", -1, -1)
        self.width = self.words.shape[1]
        if self.width % shape.heads:
            raise ModelError(
                f"the width {self.width} of the BERT model is not divisible by its {shape.heads} heads: give "
                "another model"
            )
        self._positions = weights.take("embeddings.position_embeddings.weight", -1, self.width)
        self._types = weights.take("embeddings.token_type_embeddings.weight", -1, self.width)
        self._norm = weights.norm("embeddings.LayerNorm", self.width, shape.eps)
        self._heads = shape.heads
        self._activation = activation(shape.activation)
        self._dtype = dtype
        self._layers = [
            self._layer(weights, index, last=index == shape.layers - 1, shape=shape) for index in range(shape.layers)
        ]

    def embed(self, words: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, float32 [b, t, d], from word embeddings or image tokens [b, t, d]."""
        last = len(self._positions) - 1  # positions beyond the table repeat its last one, as in published models
        positions = torch.arange(words.shape[1], device=words.device).clamp(max=last)
        embedded: torch.Tensor = self._norm(
            words + functional.embedding(token_types, self._types) + self._positions[positions]
        )
        return embedded

    def hidden_states(self, embedded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the last hidden states, float32 [b, t, d], of the result of `embed`.

        `mask` is False for padding, bool [b, t]. It is None if there is no padding, which is faster.
        """
        for layer in self._layers:
            embedded = self._run(layer, embedded, mask)
        return embedded

    def first_states(self, embedded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return ``hidden_states(embedded, mask)[:, 0]``, float32 [b, d], in less time."""
        for layer in self._layers[:-1]:
            embedded = self._run(layer, embedded, mask)
        return self._run(self._layers[-1], embedded, mask, outputs=1)[:, 0]

    def _run(
        self, layer: _Layer, x: torch.Tensor, mask: torch.Tensor | None, outputs: int | None = None
    ) -> torch.Tensor:
        """Return the output of `layer` for the first `outputs` tokens. None means all tokens."""
        low = x.to(self._dtype)
        if layer.query is None:
            query, key, value = layer.key_value(low).chunk(3, dim=2)
            query = query[:, :outputs]
        else:
            query = layer.query(low[:, :outputs])
            key, value = layer.key_value(low).chunk(2, dim=2)
        query, key, value = (  # [b, t, d] -> [b, h, t, c]
            part.view(*part.shape[:2], self._heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        attended = _attention(query, key, value, None if mask is None else mask[:, None, None, :])
        x = layer.output_norm(x[:, :outputs] + layer.output(attended.transpose(1, 2).flatten(2)))
        first, second = layer.feed_forward
        normed: torch.Tensor = layer.feed_forward_norm(x + second(self._activation(first(x))))
        return normed

    def _layer(self, weights: BertWeights, index: int, *, last: bool, shape: BertShape) -> _Layer:
        d, name, dtype = self.width, f"encoder.layer.{index}.", self._dtype
        query, *others = (f"{name}attention.self.{part}" for part in ("query", "key", "value"))
        wide = len(weights.take(f"{name}intermediate.dense.bias", -1))
        return _Layer(
            query=weights.linear([query], d, d, dtype=dtype) if last else None,  # computed for the first token only
            key_value=weights.linear(others if last else [query, *others], d, d, dtype=dtype),
            output=weights.linear([f"{name}attention.output.dense"], d, d, dtype=dtype),
            output_norm=weights.norm(f"{name}attention.output.LayerNorm", d, shape.eps),
            feed_forward=(
                weights.linear([f"{name}intermediate.dense"], wide, d, dtype=dtype),
                weights.linear([f"{name}output.dense"], d, wide, dtype=dtype),
            ),
            feed_forward_norm=weights.norm(f"{name}output.LayerNorm", d, shape.eps),
        )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention of each head, [b, h, outputs, c]. `allowed` is bool and broadcasts to [b, h, outputs, t]."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    # For the short rows of a joint encoder, torch's bfloat16 attention for CPUs takes twice as long as these products.
    scores: torch.Tensor = (query @ key.transpose(2, 3)).float() * query.shape[3] ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=3).to(value.dtype) @ value
