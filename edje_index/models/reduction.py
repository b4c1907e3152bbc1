"""Reduces n patch features to m tokens without trained weights, see the appendix of the EDJE paper.

The tokens of an image do not depend on the other images of the batch. Shape letters: b images, n patches, m tokens, d
width.
"""

from __future__ import annotations

import torch

CLUSTER_SEED = 0
CLUSTER_ITERATIONS = 25


def stride_tokens(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Keep `count` patches at equal distances. Return [b, m, d], where token i is patch floor(i n / m).

    Args:
        tokens: patch features [b, n, d].
        count: number of tokens, m.
    """
    _check(tokens, count)
    n = tokens.shape[1]
    kept = torch.arange(count, device=tokens.device) * n // count
    return tokens[:, kept]


def prune_tokens(tokens: torch.Tensor, received: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the `count` patches that receive the most attention. Return [b, m, d], in the order of the patches.

    Args:
        tokens: patch features [b, n, d].
        received: attention that each patch receives in the last layer of the vision tower [b, n].
        count: number of tokens, m.
    """
    _check(tokens, count)
    ranked = received.argsort(dim=1, descending=True, stable=True)[:, :count]
    kept = ranked.sort(dim=1).values
    return tokens.gather(1, kept[:, :, None].expand(-1, -1, tokens.shape[2]))


def cluster_tokens(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Group the patches of each image into `count` clusters. Return the cluster centres, float32 [b, m, d].

    The method is k-means with k-means++ seeding (Arthur and Vassilvitskii, 2007) and at most 25 Lloyd iterations.

    Args:
        tokens: patch features [b, n, d].
        count: number of tokens, m.
    """
    # Every image uses the same fixed random numbers. A cluster that loses all its tokens keeps its last centroid.
    _check(tokens, count)
    points = tokens.float()
    centroids = _seed_centroids(points, count)
    assignment = _nearest(points, centroids)
    for _ in range(CLUSTER_ITERATIONS):
        centroids = _mean_of_clusters(points, assignment, centroids)
        moved = _nearest(points, centroids)
        if torch.equal(moved, assignment):
            break
        assignment = moved
    return centroids


def _seed_centroids(points: torch.Tensor, count: int) -> torch.Tensor:
    """Draw the initial cluster centres [b, count, d] with k-means++ seeding."""
    b, n, _ = points.shape
    generator = torch.Generator().manual_seed(CLUSTER_SEED)
    draws = torch.rand(count, generator=generator).to(points.device)
    rows = torch.arange(b, device=points.device)
    chosen = (draws[0] * n).long().clamp(max=n - 1).expand(b)
    centroids = [points[rows, chosen]]
    distance = _squared_distance(points, centroids[0])
    for draw in draws[1:]:
        cumulative = distance.double().cumsum(dim=1)
        target = (draw.double() * cumulative[:, -1:]).contiguous()
        chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=n - 1)
        centroids.append(points[rows, chosen])
        distance = torch.minimum(distance, _squared_distance(points, centroids[-1]))
    return torch.stack(centroids, dim=1)


def _squared_distance(points: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    return (points - centre[:, None]).square().sum(dim=2)


def _nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Return the index of the centre nearest to each point, int64 [b, n]."""
    scores = centroids.square().sum(dim=2)[:, None] - 2 * points @ centroids.transpose(1, 2)
    return scores.argmin(dim=2)


def _mean_of_clusters(points: torch.Tensor, assignment: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    members = torch.nn.functional.one_hot(assignment, centroids.shape[1]).to(points.dtype)
    sizes = members.sum(dim=1)[:, :, None]
    sums = members.transpose(1, 2) @ points
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)


def _check(tokens: torch.Tensor, count: int) -> None:
    if not 1 <= count <= tokens.shape[1]:
        raise ValueError(f"cannot keep {count} of {tokens.shape[1]} tokens: give a count from 1 to {tokens.shape[1]}")
