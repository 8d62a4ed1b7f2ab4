"""The clipped Hessian of the softmax head's loss, without per-example Hessians in memory.

    H_x = A kron x x^T,  A = diag(p) - p p^T = sum over classes k < l of p_k p_l (e_k - e_l)(e_k - e_l)^T
    ||H_x||_F = ||A||_F ||x||^2

p are the predicted probabilities of row x. Clipping is one factor per row, and the sum over rows consists of
c (c - 1) / 2 weighted Gram matrices. No nearly equal numbers are subtracted.
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.models.clipping import scaled_norm
from trainables.models.shard import Shard

ROWS = 512  # rows of a chunk; fixed, because it determines how sums are rounded


def clipped_hessian_sum(shard: Shard, theta: torch.Tensor, bound: float) -> torch.Tensor:
    """For every client, the sum over its rows of per-example Hessians clipped to Frobenius norm `bound`.

    `theta` is (d,), a single lane. The sum is (clients, d, d), ordered (class, feature) where the weights are ordered
    (feature, class); see `by_class`.
    """
    clients, q = shard.clients, shard.x.shape[2]
    weights = theta.view(q, -1)
    c = weights.shape[1]
    pairs = pairs_of(c).to(theta)
    first, second = torch.combinations(torch.arange(c, device=theta.device)).unbind(1)
    grams = torch.zeros(clients, len(pairs) * q, q, dtype=torch.float64, device=theta.device)
    for start in range(0, shard.rows, ROWS):
        x = shard.x[:, start : start + ROWS].to(theta)
        p = torch.softmax(x @ weights, dim=2)
        edges = p[..., first] * p[..., second]
        norm = scaled_norm(edges @ pairs, 2) * x.square().sum(2)
        edges *= (bound / norm).clamp(max=1).unsqueeze(2)
        weighted = edges.mT.unsqueeze(2) * x.mT.unsqueeze(1)  # (clients, pairs, q, rows)
        grams += weighted.flatten(1, 2) @ x
    blocks = pairs.T.double() @ grams.view(clients, len(pairs), q * q)
    return blocks.view(clients, c, c, q, q).transpose(2, 3).reshape(clients, c * q, c * q)


def symmetric_eigh(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of (M + M^T) / 2 for every matrix M.

    Where M is not finite the eigenvalues are NaN: `eigh` would raise and stop all lanes."""
    finite = torch.isfinite(matrices).all(dim=-1).all(dim=-1)[..., None, None]
    symmetric = torch.where(finite, (matrices + matrices.mT) / 2, torch.eye(matrices.shape[-1]).to(matrices))
    values, vectors = torch.linalg.eigh(symmetric)
    return torch.where(finite.squeeze(-1), values, torch.nan), vectors


def pairs_of(classes: int) -> torch.Tensor:
    """(e_k - e_l)(e_k - e_l)^T for every pair of classes, flattened."""
    unit = torch.eye(classes)
    difference = torch.stack([unit[k] - unit[m] for k, m in torch.combinations(torch.arange(classes)).tolist()])
    return (difference.unsqueeze(2) * difference.unsqueeze(1)).flatten(1)


def by_class(values: torch.Tensor, classes: int) -> torch.Tensor:
    """Weights (..., row x class) as (..., class x row)."""
    return values.unflatten(-1, (-1, classes)).mT.flatten(-2)


def by_row(values: torch.Tensor, classes: int) -> torch.Tensor:
    """The inverse of `by_class`."""
    return values.unflatten(-1, (classes, -1)).mT.flatten(-2)
