"""The trained parts of an embedding model. The inputs are features from the frozen parts of both towers.

Shape letters: b examples, t tokens, d width of a tower, e width of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edje_index.recipes.contrastive.text_features import TextFeatures

Parameters = list[nn.Parameter]


class Heads(nn.Module):
    """The trained parts of an open_clip model: both heads, the tuned layers of the text tower, and the temperature.

    During training, image features are standardised before the image head. :meth:`fold` moves the standardisation into
    the weights of the image head.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, clip: Any, tune_text: int) -> None:
        super().__init__()
        layers = clip.text.transformer.encoder.layer
        self.image = clip.visual.head
        self.layers = layers[len(layers) - tune_text :]
        self.pool = clip.text.pooler
        self.text = clip.text.proj
        self.log_scale = clip.logit_scale
        width = self.image.mlp.fc1.in_features
        self.register_buffer("mean", torch.zeros(width), persistent=False)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def standardise(self, features: torch.Tensor) -> None:
        """Set the standardisation from the mean and standard deviation of each channel of image `features` [n, d]."""
        self.mean.copy_(features.mean(0))
        self.scale.copy_(features.std(0).clamp(min=1e-3))

    @torch.no_grad()
    def fold(self) -> None:
        """Move the standardisation into the first layer of the image head."""
        first = self.image.mlp.fc1
        first.weight.div_(self.scale)
        first.bias.sub_(first.weight @ self.mean)
        self.mean.zero_()
        self.scale.fill_(1)

    def image_embedding(self, features: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """Map image features [b, d] to embeddings [b, e]. The embeddings are not normalised."""
        result: torch.Tensor = self.image(_drop((features - self.mean) / self.scale, dropout))
        return result

    def text_embedding(self, texts: TextFeatures, dropout: float = 0.0) -> torch.Tensor:
        """Map text features to embeddings [b, e]. The embeddings are not normalised."""
        pooled = texts.values if texts.mask is None else self._pooled(texts.values, texts.mask)
        result: torch.Tensor = self.text(_drop(pooled, dropout))
        return result

    def groups(self, lr: float, text_lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameter groups for AdamW. Biases, norms and the temperature have no weight decay."""
        heads = [*self.image.parameters(), *self.text.parameters(), self.log_scale]
        groups = []
        for parameters, rate in ((heads, lr), (list(self.layers.parameters()), text_lr)):
            decayed = [p for p in parameters if p.ndim > 1]
            plain = [p for p in parameters if p.ndim <= 1]
            groups += [{"params": decayed, "peak": rate, "weight_decay": weight_decay}]
            groups += [{"params": plain, "peak": rate, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    @contextmanager
    def hidden_dropout(self, image: float, text: float) -> Iterator[None]:
        """Apply dropout to the hidden activations of both heads while the context is active."""
        parts = ((self.image, image), (self.text, text))
        handles = [
            module.register_forward_hook(lambda _module, _inputs, output, p=p: _drop(output, p))
            for head, p in parts
            for module in head.modules()
            if isinstance(module, nn.GELU)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the tuned layers on `hidden` [b, t, d], then average the tokens selected by `mask`. Return [b, d]."""
        bias = torch.zeros(mask.shape, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        for layer in self.layers:
            hidden = layer(hidden, bias[:, None, None, :])
        weights = mask.to(hidden.dtype)
        return (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def _drop(values: torch.Tensor, probability: float) -> torch.Tensor:
    return functional.dropout(values, probability) if probability else values
