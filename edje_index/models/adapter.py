"""Adapters: from the frozen tower's n patch tokens to the m tokens that are stored.

Shape letters: b images, n patches, m stored tokens, d_v the tower's width, d the language model's.
Names of parameters are those of published checkpoints (``vision_projection.*``), so that their weights
load as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from edje_index.errors import ModelError
from edje_index.models.reduction import cluster_tokens, prune_tokens, stride_tokens

COMPRESSED, LOCAL = "compressed", "local"
STRIDED, CLUSTERED, PRUNED = "strided", "clustered", "pruned"
PATCHES = "patches"
PATCH_REDUCTIONS = (STRIDED, CLUSTERED)  # of the patch tokens alone
REDUCTIONS = (*PATCH_REDUCTIONS, PRUNED)
KINDS = (COMPRESSED, LOCAL, *REDUCTIONS, PATCHES)
PUBLISHED_HIDDEN_DIM = 8192  # width of the adapters' MLP in the paper


@dataclass(frozen=True)
class AdapterConfig:
    """What decides an adapter but for its weights.

    Attributes:
        kind: ``compressed`` (learned queries attend to the patches), ``local`` (an MLP on every patch), or a
            training-free reduction followed by that MLP: ``strided``, ``clustered``, ``pruned``. ``patches`` stores
            the patch tokens untouched (d = d_v, hidden_dim 0): features to train on, not to re-rank with.
        num_tokens: m, tokens stored for an image; the tower's n for ``local`` and ``patches``.
        vision_dim: d_v.
        language_dim: d.
        hidden_dim: width of the MLP. 0 leaves the MLP out of a training-free kind (then d = d_v).
        num_heads: heads of the compressing attention; published adapters have the tower's number.
        activation: of the MLP, by its name in transformers; published adapters have the language model's.
        layer_norm_eps: of the compressing adapter; published adapters have the tower's.
    """

    kind: str
    num_tokens: int
    vision_dim: int
    language_dim: int
    hidden_dim: int = PUBLISHED_HIDDEN_DIM
    num_heads: int = 1
    activation: str = "gelu"
    layer_norm_eps: float = 1e-6

    @property
    def is_feature(self) -> bool:
        """Whether nothing in it is learned: its tokens have the tower's width and are there to train on."""
        return self.hidden_dim == 0

    def features(self, patches: int) -> AdapterConfig:
        """What this adapter is trained on: all of the tower's `patches`, or what a reduction leaves of them."""
        kind, tokens = (self.kind, self.num_tokens) if self.kind in REDUCTIONS else (PATCHES, patches)
        return AdapterConfig(kind, tokens, self.vision_dim, self.vision_dim, hidden_dim=0)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


class Adapter(nn.Module):
    """Patch tokens [b, n, d_v] to stored tokens [b, m, d].

    Attributes:
        config: what it was made from.
        needs_attention: whether ``forward`` wants the attention that patches receive [b, n].
    """

    needs_attention = False

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config


class CompressionAdapter(Adapter):
    """m learned queries attend to all patches; then a residual MLP and a projection to the language width."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        width = config.vision_dim
        self.query = nn.Parameter(torch.randn(1, config.num_tokens, width))
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, config.num_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = _ResidualMlp(width, config.hidden_dim, config.activation)
        self.projection = nn.Linear(width, config.language_dim)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[b, n, d_v] to [b, m, d]."""
        queries = self.query.expand(patches.shape[0], -1, -1)
        attended, _ = self.attention(queries, self.key(patches), self.value(patches), need_weights=False)
        result: torch.Tensor = self.projection(attended + self.mlp(self.layernorm(attended)))
        return result


class LocalAdapter(Adapter):
    """The same MLP on every token: [b, n, d_v] to [b, n, d]."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        # The names "0" and "2" are those of the published checkpoints.
        self.add_module("0", nn.Linear(config.vision_dim, config.hidden_dim))
        self.add_module("1", activation(config.activation))
        self.add_module("2", nn.Linear(config.hidden_dim, config.language_dim))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[b, n, d_v] to [b, n, d]."""
        for layer in self.children():
            patches = layer(patches)
        return patches


class ReducedAdapter(Adapter):
    """A training-free reduction to m tokens, then the local MLP (or nothing)."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__(config)
        self.needs_attention = config.kind == PRUNED
        self.local: nn.Module = LocalAdapter(config) if config.hidden_dim else nn.Identity()

    def forward(self, patches: torch.Tensor, received: torch.Tensor | None = None) -> torch.Tensor:
        """[b, n, d_v], and for ``pruned`` the attention received [b, n], to [b, m, d]."""
        result: torch.Tensor = self.local(self._reduce(patches, received))
        return result

    def _reduce(self, patches: torch.Tensor, received: torch.Tensor | None) -> torch.Tensor:
        count = self.config.num_tokens
        if self.config.kind == STRIDED:
            return stride_tokens(patches, count)
        if self.config.kind == CLUSTERED:
            with torch.autocast(patches.device.type, enabled=False):
                return cluster_tokens(patches, count)
        if received is None:
            raise ValueError("attention pruning needs the attention that each patch receives")
        return prune_tokens(patches, received, count)


class PatchesAdapter(Adapter):
    """Nothing: [b, n, d_v] to the same. It has no weights."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[b, n, d_v] to [b, n, d_v]."""
        return patches


class _ResidualMlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation_name: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.activation_fn = activation(activation_name)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(self.activation_fn(self.fc1(tokens)))
        return result


def build_adapter(config: AdapterConfig) -> Adapter:
    """An adapter with random weights (torch's default initialisation), in evaluation mode.

    Raises:
        ModelError: sizes or names that make no adapter.
    """
    _check(config)
    if config.kind == COMPRESSED:
        return CompressionAdapter(config).eval()
    if config.kind == LOCAL:
        return LocalAdapter(config).eval()
    if config.kind == PATCHES:
        return PatchesAdapter(config).eval()
    return ReducedAdapter(config).eval()


def activation(name: str) -> nn.Module:
    """An activation by its name in transformers (``gelu``, ``gelu_new``, ``relu``, ``silu``, ...).

    Raises:
        ModelError: no such activation.
    """
    if name == "gelu":  # what all released models have; the encoder then runs without transformers
        return nn.GELU()
    from edje_index.models._torchvision_compat import prepare_torchvision

    prepare_torchvision()
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ModelError(f"unknown activation {name!r}; transformers has {', '.join(sorted(ACT2FN))}")
    module: nn.Module = ACT2FN[name]
    return module


def _check(config: AdapterConfig) -> None:
    if config.kind not in KINDS:
        raise ModelError(f"unknown adapter {config.kind!r}; one of {', '.join(KINDS)}")
    sizes = (config.num_tokens, config.vision_dim, config.language_dim, config.num_heads)
    if min(sizes) < 1 or config.hidden_dim < 0:
        raise ModelError(f"the adapter's sizes must be positive: {config}")
    if config.kind == COMPRESSED and config.vision_dim % config.num_heads:
        raise ModelError(
            f"{config.num_heads} heads do not divide the tower's width {config.vision_dim}; "
            "give the vision tower's own number of heads"
        )
    if config.hidden_dim == 0 and (config.kind in (COMPRESSED, LOCAL) or config.vision_dim != config.language_dim):
        raise ModelError("only a training-free adapter with equal widths can do without a hidden layer")
    if config.kind == PATCHES and config.hidden_dim:
        raise ModelError("an adapter of kind 'patches' stores patch tokens as they are: its hidden width must be 0")
