# SPDX-License-Identifier: Apache-2.0
"""Random problems of the indexer's loss over lists of keys, with the loss and its gradients in float64 by autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

NEG_INF = float("-inf")


@dataclass
class KlProblem:
    """Tensors as of ``api.indexer_kl``. ``lists`` have -1 and repeated entries, and one is empty. A
    query has an lse of -inf and NaN in its rows; keys that nobody lists have NaN, too."""

    q_index: torch.Tensor
    k_index: torch.Tensor
    weights: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    lists: torch.Tensor
    scale: float
    grad: torch.Tensor  # of the divergences

    def scaled(self, grad: float) -> KlProblem:
        return replace(self, grad=self.grad * grad)

    def of_queries(self, rows: torch.Tensor | slice) -> KlProblem:
        names = ("q_index", "weights", "q", "lse", "lists", "grad")
        return replace(self, **{name: getattr(self, name).detach()[rows] for name in names})

    def truth(self) -> tuple[torch.Tensor, ...]:
        """Divergences and gradients of q_index, k_index and weights in float64, by the definition, from a matrix of
        all queries and keys."""
        number = torch.arange(len(self.k), device=self.k.device)
        is_alive = (self.lse != NEG_INF).all(1)
        sees = torch.zeros(len(self.q), len(self.k), dtype=torch.bool, device=self.k.device)
        for row, keys in enumerate(self.lists):
            sees[row] = torch.isin(number, keys)
        sees &= is_alive[:, None]
        is_listed = sees.any(0)
        q_index, weights, q, lse = (
            x.double().masked_fill(~is_alive.view(-1, *[1] * (x.dim() - 1)), 0)
            for x in (self.q_index, self.weights, self.q, self.lse)
        )  # fmt: skip
        k_index = self.k_index.double().masked_fill(~is_listed[:, None], 0)
        k = self.k.double().masked_fill(~is_listed[:, None, None], 0)
        leaves = [x.requires_grad_() for x in (q_index, k_index, weights)]
        logits = _products(q, k) * self.scale
        target = (logits - lse[..., None]).exp().sum(1).masked_fill(~sees, 0)
        target = (target / target.sum(1, keepdim=True)).nan_to_num()
        scores = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q_index, k_index).relu(), weights)
        log_share = scores.masked_fill(~sees, NEG_INF).log_softmax(1).masked_fill(~sees, 0)
        divergence = (target.xlogy(target) - target * log_share).sum(1)
        grads = torch.autograd.grad(divergence, leaves, self.grad.double())
        return divergence.detach(), *grads

    def check(self, divergence: torch.Tensor, *grads: torch.Tensor) -> None:
        """Asserts that these are what products of 16-bit numbers explain."""
        want, *wanted = self.truth()
        # A list of one key has no gradient; the rounding of its share of 1 in float32 gives a weight this one.
        longest = [x.float().nan_to_num().norm(dim=-1).max() for x in (self.q_index, self.k_index, self.grad[:, None])]
        noise = 2**-23 * float(torch.stack(longest).prod())
        assert_near("divergence", divergence, want, 1e-4)
        for name, got, of in zip(("dq_index", "dk_index", "dweights"), grads, wanted):
            assert_near(name, got, of, 1e-2, 1e-6 + noise)
        is_listed = torch.zeros(len(self.k), dtype=torch.bool, device=self.k.device)
        alive = self.lists[(self.lse != NEG_INF).all(1)]
        is_listed[alive[alive >= 0]] = True
        assert not grads[1][~is_listed].any(), "a key that nobody lists has a gradient"


def random_kl(
    gen: torch.Generator, dtype: torch.dtype, queries: int, keys: int, index_heads: int, index_dim: int, heads: int,
    heads_kv: int, dim: int, entries: int,
) -> KlProblem:  # fmt: skip
    """On the generator's device; three queries or more."""
    device = gen.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device)

    scale = dim**-0.5
    q, k = normal(queries, heads, dim).to(dtype), normal(keys, heads_kv, dim).to(dtype)
    # the lse of attention over all keys, so that heads give different shares to the lists
    lse = (_products(q.double(), k.double()) * scale).logsumexp(2).float()
    lists = torch.randint(-keys // 8, keys, (queries, entries), generator=gen, device=device)
    lists[0] = -1
    lists[1, 3:] = -1
    lse[2, heads // 2] = NEG_INF
    q_index, k_index = normal(queries, index_heads, index_dim).to(dtype), normal(keys, index_dim).to(dtype)
    weights = normal(queries, index_heads) * (index_heads * index_dim) ** -0.5
    for x in (q_index, q, weights):
        x[2] = float("nan")
    is_listed = torch.zeros(keys, dtype=torch.bool, device=device)
    is_listed[lists[lists >= 0]] = True
    k[~is_listed] = k_index[~is_listed] = float("nan")
    return KlProblem(q_index, k_index, weights, q, k, lse, lists, scale, normal(queries))


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(queries, heads, keys), of each query head with its kv head."""
    return torch.einsum("tkgd,skd->tkgs", q.unflatten(1, (k.shape[1], -1)), k).flatten(1, 2)


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, share: float, least: float = 1e-6) -> None:
    """All within a share of the largest, and ``least``."""
    assert got.isfinite().all(), f"{name} is not finite"
    off = float((got.double() - want).abs().max())
    allowed = least + share * float(want.abs().max())
    assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"
