"""Adapters map the n patch features of an image, or of all frames of a clip, to m
stored tokens.

Shape letters: b images or clips, n patches, m tokens, d_v width of the vision tower, d
width of the language model. Parameters have the same names as in published checkpoints
(``vision_projection.*``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from storage_formats.atomic import Json

COMPRESSED = "compressed"
LOCAL = "local"
STRIDED = "strided"
CLUSTERED = "clustered"
PRUNED = "pruned"
PATCHES = "patches"
REDUCTIONS = (STRIDED, CLUSTERED, PRUNED)
KINDS = (COMPRESSED, LOCAL, *REDUCTIONS, PATCHES)
# hidden width of the MLP of the adapters in the EDJE paper
PUBLISHED_HIDDEN_DIM = 8192
CLUSTER_SEED = 0
CLUSTER_ITERATIONS = 25


@dataclass(frozen=True)
class AdapterConfig:
    """Configuration of an adapter: everything except the weights.

    Attributes:
        kind: kind of adapter. ``compressed``: learned queries attend to the patches.
            ``local``: an MLP on every patch. ``strided``, ``clustered``, ``pruned``:
            reduction to m patches, then an MLP. ``patches``: patch features without
            change, for training.
        num_tokens: number of tokens per image, m. For ``local`` and ``patches``, m is
            n.
        vision_dim: width of the vision tower, d_v.
        language_dim: width of the language model, d.
        hidden_dim: hidden width of the MLP. If it is 0, there is no MLP, and d must be
            d_v.
        num_heads: number of attention heads of a ``compressed`` adapter, the same as in
            the vision tower.
        activation: name of the activation of the MLP in transformers.
        layer_norm_eps: epsilon of the layer norm of a ``compressed`` adapter, the same
            as in the vision tower.
    """

    kind: str
    num_tokens: int
    vision_dim: int
    language_dim: int
    hidden_dim: int = PUBLISHED_HIDDEN_DIM
    num_heads: int = 1
    activation: str = "gelu"
    layer_norm_eps: float = 1e-6

    @classmethod
    def from_json(cls, value: Json, source: Path) -> AdapterConfig:
        """Return the configuration with the fields `value`, which were read from
        `source`.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise ModelError(
                f"{source} describes an adapter that this version does not support:"
                f" {error}; upgrade edje-index"
            ) from error

    @property
    def is_feature(self) -> bool:
        """True if the adapter has no weights. The tokens of such an adapter are the
        features on which other adapters are trained.
        """
        return self.hidden_dim == 0

    def features(self, patches: int) -> AdapterConfig:
        """Return the configuration of the adapter without weights that computes the
        training input of this adapter.

        `patches` is the number of patches per image.
        """
        # If this adapter reduces patches, its training input is the reduced patches.
        # Otherwise, its training input is the features of all patches.
        width = self.vision_dim
        if self.kind in REDUCTIONS:
            return AdapterConfig(self.kind, self.num_tokens, width, width, 0)
        return AdapterConfig(PATCHES, patches, width, width, 0)


class Adapter(nn.Module):
    """Maps patch features [b, n, d_v] to stored tokens [b, m, d].

    Attributes:
        needs_attention: True if ``forward`` has a second argument, the attention that
            each patch receives [b, n].
    """

    needs_attention = False

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config


class CompressionAdapter(Adapter):
    """The ``compressed`` adapter: m learned queries attend to all patches. A
    residual MLP and a projection follow.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        width = config.vision_dim
        self.query = nn.Parameter(torch.randn(1, config.num_tokens, width))
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(
            width, config.num_heads, batch_first=True
        )
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = _ResidualMlp(width, config.hidden_dim, config.activation)
        self.projection = nn.Linear(width, config.language_dim)

    def forward(self, patches: Tensor) -> Tensor:
        """Map patch features [b, n, d_v] to tokens [b, m, d]."""
        attended, _ = self._attend(patches, need_weights=False)
        result: Tensor = self.projection(attended + self.mlp(self.layernorm(attended)))
        return result

    def query_attention(self, patches: Tensor) -> Tensor:
        """Return the attention weights of the queries over the patches [b, n, d_v],
        averaged over heads, [b, m, n].
        """
        weights: Tensor = self._attend(patches, need_weights=True)[1]
        return weights

    def _attend(self, patches: Tensor, *, need_weights: bool) -> Any:
        queries = self.query.expand(patches.shape[0], -1, -1)
        return self.attention(
            queries, self.key(patches), self.value(patches), need_weights=need_weights
        )


class LocalAdapter(Adapter):
    """The ``local`` adapter: one MLP, applied to every patch."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        # The linear layers have the names "0" and "2" in published checkpoints.
        self.add_module("0", nn.Linear(config.vision_dim, config.hidden_dim))
        self.add_module("1", activation(config.activation))
        self.add_module("2", nn.Linear(config.hidden_dim, config.language_dim))

    def forward(self, patches: Tensor) -> Tensor:
        """Map patch features [b, n, d_v] to tokens [b, n, d]."""
        for layer in self.children():
            patches = layer(patches)
        return patches


class ReducedAdapter(Adapter):
    """A ``strided``, ``clustered``, ``pruned`` or ``patches`` adapter.

    The first three kinds reduce the patches of an image to m patches. If ``hidden_dim``
    is not 0, they then apply a ``local`` adapter. An adapter of the kind ``patches``
    returns the patches unchanged.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        self.needs_attention = config.kind == PRUNED
        self.local: nn.Module = (
            LocalAdapter(config) if config.hidden_dim else nn.Identity()
        )

    def forward(self, patches: Tensor, received: Tensor | None = None) -> Tensor:
        """Map patch features [b, n, d_v] to tokens [b, m, d].

        `received` is the attention that each patch receives [b, n]. Only a ``pruned``
        adapter needs this argument.
        """
        count = self.config.num_tokens
        if self.config.kind == PATCHES:
            tokens = patches
        elif self.config.kind == STRIDED:
            tokens = stride_tokens(patches, count)
        elif self.config.kind == CLUSTERED:
            with torch.autocast(patches.device.type, enabled=False):
                tokens = cluster_tokens(patches, count)
            # The reduced patches are float32. They are converted to the data type of
            # the weights, which may be bfloat16. Without weights, they stay float32.
            tokens = tokens.to(next(self.local.parameters(), tokens).dtype)
        else:
            assert received is not None
            tokens = prune_tokens(patches, received, count)
        result: Tensor = self.local(tokens)
        return result


# The layers have the same names as in published checkpoints.
class _ResidualMlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation_name: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation_fn = activation(activation_name)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.activation_fn(self.fc1(tokens)))
        return result


def build_adapter(config: AdapterConfig) -> Adapter:
    """Build an adapter with random weights, in evaluation mode."""
    if config.kind not in KINDS:
        raise ModelError(
            f"unknown adapter {config.kind!r}: give one of {', '.join(KINDS)}"
        )
    d_v = config.vision_dim
    sizes = (config.num_tokens, d_v, config.language_dim, config.num_heads)
    if min(sizes) < 1 or config.hidden_dim < 0:
        raise ModelError(
            "the sizes of an adapter must be positive (hidden_dim may be 0); got"
            f" {config}"
        )
    if config.kind == COMPRESSED and d_v % config.num_heads:
        raise ModelError(
            f"the width {d_v} of the tower is not divisible by"
            f" {config.num_heads} heads: set num_heads to the number of attention heads"
            " of the tower"
        )
    fits = config.kind != PATCHES
    if config.is_feature:
        fits = config.kind in (*REDUCTIONS, PATCHES) and d_v == config.language_dim
    if not fits:
        raise ModelError(
            "hidden_dim must be 0 for a patches adapter, and may be 0 for a strided,"
            " clustered or pruned adapter, with equal vision_dim and language_dim; got"
            f" {config}"
        )
    if config.kind == COMPRESSED:
        return CompressionAdapter(config).eval()
    if config.kind == LOCAL:
        return LocalAdapter(config).eval()
    return ReducedAdapter(config).eval()


def activation(name: str) -> nn.Module:
    """Return the activation that transformers calls ``name``, for example ``gelu``
    or ``relu``.
    """
    # All published models have this activation. Without this branch, they would import
    # transformers, which takes two seconds.
    if name == "gelu":
        return nn.GELU()
    prepare_torchvision()
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ModelError(
            f"unknown activation {name!r}: give one of {', '.join(sorted(ACT2FN))}"
        )
    module: nn.Module = ACT2FN[name]
    return module


# The functions below reduce patches without trained weights, see the appendix of the
# EDJE paper. The tokens of an image do not depend on the other images of the batch.


def stride_tokens(patches: Tensor, count: int) -> Tensor:
    """Keep m = `count` of the patches [b, n, d_v] at equal distances: token i is
    patch floor(i n / m).
    """
    n = patches.shape[1]
    return patches[:, torch.arange(count, device=patches.device) * n // count]


def prune_tokens(patches: Tensor, received: Tensor, count: int) -> Tensor:
    """Keep the `count` of the patches [b, n, d_v] that receive the most attention in
    the last layer of the tower.

    `received` is the attention that each patch receives [b, n]. The tokens are in the
    order of the patches.
    """
    kept = (
        received.argsort(dim=1, descending=True, stable=True)[:, :count]
        .sort(dim=1)
        .values
    )
    return patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))


def cluster_tokens(patches: Tensor, count: int) -> Tensor:
    """Group the patches [b, n, d_v] of each image into m = `count` clusters. Return the
    centres of the clusters, float32 [b, m, d_v].

    The method is k-means with k-means++ seeding (Arthur and Vassilvitskii, 2007) and at
    most 25 Lloyd iterations.
    """
    # All images use the same fixed random numbers, so that the result for an image does
    # not depend on the other images.
    points = patches.float()
    b, n, _ = points.shape
    generator = torch.Generator().manual_seed(CLUSTER_SEED)
    draws = torch.rand(count, dtype=torch.float32, generator=generator)
    draws = draws.to(points.device)
    rows = torch.arange(b, device=points.device)
    chosen = (draws[0] * n).long().clamp(max=n - 1).expand(b)
    drawn = [points[rows, chosen]]
    distance = points.new_full((b, n), torch.inf)
    for draw in draws[1:]:
        distance = torch.minimum(
            distance, (points - drawn[-1][:, None]).square().sum(dim=2)
        )
        cumulative = distance.double().cumsum(dim=1)
        target = (draw.double() * cumulative[:, -1:]).contiguous()
        chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(
            max=n - 1
        )
        drawn.append(points[rows, chosen])
    centres = torch.stack(drawn, dim=1)
    assignment = _nearest(points, centres)
    for _ in range(CLUSTER_ITERATIONS):
        members = nn.functional.one_hot(assignment, count).to(points.dtype)
        sizes = members.sum(dim=1)[:, :, None]
        sums = members.transpose(1, 2) @ points
        # A cluster that loses all its patches keeps its last centre.
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        moved = _nearest(points, centres)
        if torch.equal(moved, assignment):
            break
        assignment = moved
    return centres


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the centre nearest to each point, int64 [b, n]."""
    scores = centres.square().sum(dim=2)[:, None] - 2 * points @ centres.transpose(1, 2)
    return scores.argmin(dim=2)
