"""The frozen vision tower computes the patch features and the pooled embedding of an
image in one pass.

The patch features are the same as in the published EDJE code. For timm models, they
are the last hidden states. For vision transformers of open_clip, they are the outputs
of the second-to-last layer.

Shape letters: b images, n patches, t positions, h heads, c width of a head, d width of
the tower, e width of the embedding. The t positions are class and register tokens,
followed by the n patches.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()

from open_clip.timm_model import TimmModel  # noqa: E402
from open_clip.transformer import (  # noqa: E402
    ResidualAttentionBlock,
    VisionTransformer,
)


class VisionTower(nn.Module, ABC):
    """A frozen vision transformer. :func:`vision_tower` makes one from the image tower
    of an open_clip model.

    Attributes:
        patch_dim: width d of the patch features.
        num_patches: number n of patches per image.
        embed_dim: width e of the pooled embedding.
        num_heads: number of attention heads.
        layer_norm_eps: epsilon of the final layer norm. Published adapters use the same
            epsilon.
        image_size: (height, width) of the images that ``encode`` expects, in pixels.

    Examples:
        >>> import torch
        >>> from edje_index import ModelBundle
        >>> vision = ModelBundle.load("model").vision
        >>> patches, embeddings = vision.encode(torch.zeros(2, 3, *vision.image_size))
        >>> patches.shape == (2, vision.num_patches, vision.patch_dim)
        True
        >>> tuple(embeddings.shape)
        (2, 24)
    """

    patch_dim: int
    num_patches: int
    embed_dim: int
    num_heads: int
    layer_norm_eps: float
    image_size: tuple[int, int]

    def __init__(self, visual: Any, embed_dim: int) -> None:
        super().__init__()
        self.visual = visual.requires_grad_(False)
        self.embed_dim = embed_dim
        self.image_size = (int(visual.image_size[0]), int(visual.image_size[1]))
        self.eval()

    @abstractmethod
    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the patch features [b, n, d] and the L2-normalised embeddings [b, e]
        of images.

        ``pixels`` has the shape [b, 3, height, width].
        """

    def encode_with_attention(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of ``encode``, and the attention that each patch
        receives [b, n].

        The attention that a patch receives is the mean of its softmax weights in the
        last layer, over all heads and over all queries, including the class token.

        Raises:
            ModelError: the last layer has another kind of attention.
        """
        # Another thread may run the same layer meanwhile.
        caller = threading.get_ident()
        normalized: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if threading.get_ident() == caller:
                normalized.append(output)

        handle = self._last_norm().register_forward_hook(keep)
        try:
            patches, embeddings = self.encode(pixels)
        finally:
            handle.remove()
        received = received_attention(*self._queries_and_keys(normalized[0]))
        return patches, embeddings, received[:, -self.num_patches :]

    @abstractmethod
    def _last_norm(self) -> nn.Module:
        """Return the layer norm before the attention of the last layer."""

    @abstractmethod
    def _queries_and_keys(self, normalized: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return the queries, keys and scale of the last layer, as arguments of
        `received_attention`. `normalized` [b, t, d] is the output of `_last_norm`.
        """


class TimmTower(VisionTower):
    """A vision transformer from timm: SigLIP, SigLIP2, EVA, DINOv2."""

    def __init__(self, visual: Any, embed_dim: int) -> None:
        super().__init__(visual, embed_dim)
        trunk = visual.trunk
        if not hasattr(trunk, "blocks") or not hasattr(trunk, "num_prefix_tokens"):
            raise ModelError(
                f"the vision tower {type(trunk).__name__} has no patch features: choose"
                " a vision transformer (ViT)"
            )
        self.prefix = int(trunk.num_prefix_tokens)
        self.patch_dim = int(trunk.num_features)
        self.num_patches = int(trunk.patch_embed.num_patches)
        self.num_heads = int(trunk.blocks[-1].attn.num_heads)
        self.layer_norm_eps = float(getattr(trunk.norm, "eps", 1e-6))

    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        trunk = self.visual.trunk
        hidden = trunk.forward_features(pixels)
        embedding = self.visual.head(trunk.forward_head(hidden)).float()
        return hidden[:, self.prefix :], functional.normalize(embedding, dim=-1)

    def _last_norm(self) -> nn.Module:
        trunk = self.visual.trunk
        attention = trunk.blocks[-1].attn
        is_rotary = getattr(trunk, "rope", None) is not None
        if (
            not hasattr(attention, "qkv")
            or not hasattr(attention, "q_norm")
            or is_rotary
        ):
            raise ModelError(
                "a pruned adapter does not support the vision tower"
                f" {type(trunk).__name__}: choose another adapter"
            )
        norm: nn.Module = trunk.blocks[-1].norm1
        return norm

    def _queries_and_keys(self, normalized: Tensor) -> tuple[Tensor, Tensor, float]:
        attention = self.visual.trunk.blocks[-1].attn
        q, k = _split(attention.qkv(normalized), attention.num_heads)
        return attention.q_norm(q), attention.k_norm(k), attention.scale


class ClipTower(VisionTower):
    """A vision transformer from open_clip, for example CLIP, DFN or MetaCLIP."""

    def __init__(self, visual: Any, embed_dim: int) -> None:
        super().__init__(visual, embed_dim)
        blocks = visual.transformer.resblocks
        if len(blocks) < 2:
            raise ModelError(
                f"the vision tower has {len(blocks)} layers, but patch features need at"
                " least 2: choose another tower"
            )
        self.patch_dim = int(visual.conv1.out_channels)
        self.num_patches = int(visual.grid_size[0] * visual.grid_size[1])
        self.num_heads = int(blocks[-1].attn.num_heads)
        self.layer_norm_eps = float(visual.ln_post.eps)
        self._penultimate = len(blocks) - 2

    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.visual.forward_intermediates(
            pixels, indices=[self._penultimate], output_fmt="NLC"
        )
        embedding = functional.normalize(output["image_features"].float(), dim=-1)
        return output["image_intermediates"][0], embedding

    def _last_norm(self) -> nn.Module:
        block = self.visual.transformer.resblocks[-1]
        if not isinstance(block, ResidualAttentionBlock):
            raise ModelError(
                "a pruned adapter does not support a vision tower with layers of type "
                f"{type(block).__name__}: choose another adapter"
            )
        norm: nn.Module = block.ln_1
        return norm

    def _queries_and_keys(self, normalized: Tensor) -> tuple[Tensor, Tensor, float]:
        attention = self.visual.transformer.resblocks[-1].attn
        qkv = functional.linear(
            normalized, attention.in_proj_weight, attention.in_proj_bias
        )
        q, k = _split(qkv, attention.num_heads)
        return q, k, attention.head_dim**-0.5


def vision_tower(visual: Any, embed_dim: int) -> VisionTower:
    """Make a `VisionTower` from the image tower of an open_clip model,
    ``model.visual``. `embed_dim` is the width of the embeddings.

    Raises:
        ModelError: the image tower is no vision transformer.
    """
    if isinstance(visual, TimmModel):
        return TimmTower(visual, embed_dim)
    if isinstance(visual, VisionTransformer):
        return ClipTower(visual, embed_dim)
    raise ModelError(
        f"the vision tower {type(visual).__name__} has no patch features: choose a"
        " vision transformer (ViT)"
    )


def received_attention(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the attention that each key receives, averaged over heads and queries,
    float32 [b, t].

    `q` and `k` are the queries and keys [b, h, t, c]. `scale` is a factor that
    multiplies the queries.
    """
    # The heads are computed one by one, so that only the b x t x t attention weights of
    # one head are in memory.
    heads = q.shape[1]
    total = torch.zeros(k.shape[0], k.shape[2], dtype=torch.float32, device=k.device)
    for head in range(heads):
        scores = (q[:, head] * scale) @ k[:, head].transpose(-1, -2)
        total += scores.float().softmax(dim=-1).mean(dim=1)
    return total / heads


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Split the joint projection `qkv` [b, t, 3 h c]. Return queries and keys, [b,
    h, t, c] each.
    """
    q, k, _ = qkv.reshape(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    return q, k
