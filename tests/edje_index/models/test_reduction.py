"""Training-free reductions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from edje_index.models.adapter import cluster_tokens, prune_tokens, stride_tokens


def random_tokens(b: int, n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_stride_spreads_evenly_whatever_the_counts(sizes: tuple[int, int]) -> None:
    n, m = sizes
    positions = stride_tokens(torch.arange(n)[None, :, None], m)[0, :, 0]
    assert positions[0] == 0
    assert len(positions) == m
    steps = set(torch.diff(positions).tolist())
    assert steps <= {n // m, -(-n // m)}


def test_prune_keeps_the_most_attended_in_image_order() -> None:
    tokens = torch.arange(5.0)[None, :, None].repeat(2, 1, 1)
    received = torch.tensor([[0.1, 0.5, 0.2, 0.9, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])
    kept = prune_tokens(tokens, received, 3)[:, :, 0]
    assert kept.tolist() == [[1, 3, 4], [0, 1, 2]]


def test_centroids_are_the_means_of_their_tokens() -> None:
    tokens = random_tokens(3, 50, 4)
    centroids = cluster_tokens(tokens, 8)
    assert centroids.dtype == torch.float32
    nearest = torch.cdist(tokens, centroids).argmin(dim=2)
    for image in range(3):
        for cluster in range(8):
            members = tokens[image][nearest[image] == cluster]
            torch.testing.assert_close(centroids[image, cluster], members.mean(dim=0), atol=1e-5, rtol=0)


def test_clusters_do_not_depend_on_the_other_images() -> None:
    tokens = random_tokens(4, 30, 5)
    together = cluster_tokens(tokens, 6)
    alone = torch.cat([cluster_tokens(tokens[i : i + 1], 6) for i in range(4)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert torch.equal(together, cluster_tokens(tokens, 6))


def test_clusters_of_equal_tokens_have_no_holes() -> None:
    """All clusters but one lose their tokens; none may turn into NaN."""
    tokens = torch.ones(2, 9, 3)
    assert torch.equal(cluster_tokens(tokens, 4), torch.ones(2, 4, 3))
