"""Linear algebra for fitting the pooled similarity, in float64."""

from __future__ import annotations

import torch

# Chosen on the dev captions of Flickr8k. A ridge is a fraction of the mean variance.
PATCH_RIDGE = 0.1
CAPTION_RIDGE = 0.1
TOKEN_RIDGE = 0.01
POWER = 1.5


def canonical_maps(
    images: torch.Tensor, captions: torch.Tensor, across: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run canonical correlation analysis with ridge regularisation (Vinod, 1976).

    Args:
        images: covariance matrix of the image variables [p, p].
        captions: covariance matrix of the caption variables [q, q].
        across: covariance matrix between image variables and caption variables [p, q].
        dim: maximum width of the common space.

    Returns:
        The matrix that maps image variables into the common space [p, k], and the matrix that maps caption variables
        into the common space [q, k], with k at most `dim`. Each dimension of this space is scaled by a power of its
        canonical correlation (Gong et al., 2014).
    """
    left, right = _inverse_root(images, PATCH_RIDGE), _inverse_root(captions, CAPTION_RIDGE)
    u, correlations, vh = torch.linalg.svd(left @ across @ right, full_matrices=False)
    scale = correlations[:dim] ** POWER
    return left @ u[:, :dim] * scale, right @ vh.T[:, :dim] * scale


def _inverse_root(covariance: torch.Tensor, ridge: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    ridged = values + ridge * values.mean().clamp(min=torch.finfo(values.dtype).tiny)
    root: torch.Tensor = vectors * ridged.rsqrt() @ vectors.T
    return root


def ridge_map(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the ridge-regression matrix [p, k] that predicts `targets` [n, k] from centred `inputs` [n, p]."""
    gram = inputs.T @ inputs
    penalty = TOKEN_RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(penalty)
    solved: torch.Tensor = torch.linalg.solve(gram, inputs.T @ targets)
    return solved


def column_scale(values: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each column of `values` [n, p], shape [p]; 1 for a constant column."""
    deviation = values.std(dim=0, correction=0)
    return torch.where(deviation > 1e-9, deviation, 1.0)
