"""Where the compressing adapter's projection begins: at the linear map from patches to words.

Which patch shows which word nobody knows, but of many images the mean patch and the mean word of their captions are
known; the map between those, fitted by ridge regression, serves for single patches as well. The alignment then begins
with tokens that lie among the words already; see docs/architecture.md for what that brings.
"""

from __future__ import annotations

import torch

from edje_index.models.adapter import CompressionAdapter

FIT_IMAGES = 6_000
_RIDGE = 0.1  # of the mean variance, on both sides
_MLP_SHARE = 0.1  # at random it would drown what is fitted


@torch.no_grad()
def begin_at_words(
    adapter: CompressionAdapter, patches: torch.Tensor, described: torch.Tensor, words: torch.Tensor
) -> None:
    """Set the projection of `adapter`, whose values are patches without their mean (`queries.begin_at_clusters`).

    The words are whitened for the fit: else all tokens come out near the few directions that most captions share.

    Args:
        adapter: its MLP is scaled down.
        patches: mean patch of each image, float64 [n, d_v].
        described: mean of its captions' content words, float64 [n, d]. Where all are alike, nothing is changed.
        words: vectors of the vocabulary [v, d]: tokens get their mean and their usual distance from it.
    """
    seen, said = patches - patches.mean(dim=0), described - described.mean(dim=0)
    if not seen.any() or not said.any():
        return
    fitted = torch.linalg.solve(_covariance(seen), seen.T @ said / len(seen))  # [d_v, d]
    values, directions = torch.linalg.eigh(_covariance(said))
    fitted = fitted @ (directions * values.rsqrt()) @ directions.T
    mean = words.mean(dim=0)
    distance = (words - mean).norm(dim=1).mean() / (seen @ fitted).norm(dim=1).mean()
    adapter.projection.weight.copy_(fitted.T * distance)
    adapter.projection.bias.copy_(mean)
    adapter.mlp.fc2.weight.mul_(_MLP_SHARE)
    adapter.mlp.fc2.bias.zero_()


def _covariance(centred: torch.Tensor) -> torch.Tensor:
    """Of [n, d], with the ridge on its diagonal: [d, d]."""
    found = centred.T @ centred / len(centred)
    return found + _RIDGE * found.diagonal().mean() * torch.eye(len(found), dtype=found.dtype)
