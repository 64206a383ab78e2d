# SPDX-License-Identifier: Apache-2.0
"""What the best keys of an indexer have to be, for kernels that add up in float32."""

from __future__ import annotations

import torch


def random_bounds(gen: torch.Generator, queries: int, keys: int) -> torch.Tensor:
    """int64 (queries, 2) on the generator's device: some below 0, some empty, some of all keys."""
    bounds = torch.randint(-20, keys + 1, (queries, 2), generator=gen, device=gen.device).sort(1).values
    bounds[torch.rand(queries, generator=gen, device=gen.device) < 0.2] = torch.tensor([0, keys], device=gen.device)
    bounds[torch.rand(queries, generator=gen, device=gen.device) < 0.1] = torch.tensor([5, 5], device=gen.device)
    return bounds


def assert_best(
    lists: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor, count: int
) -> None:
    """``lists`` ascend within the bounds, are as long as they can be, and no key outside has a score in float64 that is
    above that of one inside by more than both may be off in float32."""
    keys = len(k)
    number = torch.arange(keys, device=k.device)
    sees = (number >= bounds[:, :1]) & (number < bounds[:, 1:])
    k = torch.where(sees.any(0)[:, None], k, 0)
    dots = torch.einsum("qhd,kd->qhk", q.double(), k.double())
    scores = torch.einsum("qhk,qh->qk", dots.relu(), weights.double())
    sizes = torch.einsum("qhd,kd->qhk", q.double().abs(), k.double().abs())
    off = torch.einsum("qhk,qh->qk", sizes, weights.double().abs()) * (q.shape[1] + q.shape[2]) * 2.0**-23
    is_chosen = torch.zeros_like(sees)
    for row, chosen in enumerate(lists.tolist()):
        named = [key for key in chosen if key >= 0]
        assert named == sorted(set(named)) and chosen[len(named) :] == [-1] * (count - len(named)), f"query {row}"
        assert len(named) == min(count, int(sees[row].sum())), f"query {row} has {len(named)} keys"
        is_chosen[row, named] = True
    assert not (is_chosen & ~sees).any(), "a key outside the bounds"
    least = (scores + off).masked_fill(~is_chosen, float("inf")).amin(1)
    most = (scores - off).masked_fill(is_chosen | ~sees, float("-inf")).amax(1)
    assert (least >= most).all(), f"better keys were left out for queries {(least < most).nonzero().flatten().tolist()}"


__all__ = ["assert_best", "random_bounds"]
