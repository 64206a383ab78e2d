# SPDX-License-Identifier: Apache-2.0
"""What the best keys, or blocks of keys, of an indexer have to be, for kernels that add up in float32."""

from __future__ import annotations

import torch

_INF = float("inf")


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
    scores, off, sees = _exact_scores(q, k, weights, bounds)
    _assert_best(lists[:, None], scores + off, scores - off, sees, torch.zeros_like(sees), count)


def assert_best_blocks(
    lists: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, bounds: torch.Tensor,
    count: int, block_size: int, local_blocks: int,
) -> None:  # fmt: skip
    """The same of ``lists`` (queries, lists, count) of blocks, which have the scores of their best keys. They hold the
    last ``local_blocks`` that a query sees."""
    scores, off, sees = _exact_scores(q, k, weights, bounds)
    low = bounds[:, :1].clamp(min=0)
    num_blocks = -(-(bounds[:, 1:].clamp(max=len(k)) - low).clamp(min=0) // block_size)
    block = torch.arange(-(-len(k) // block_size), device=k.device)
    of_key = ((torch.arange(len(k), device=k.device) - low) // block_size).clamp(0, len(block) - 1)
    most, least = (
        torch.full((*scores.shape[:2], len(block)), -_INF, dtype=torch.float64, device=k.device).scatter_reduce(
            2, of_key[:, None].expand_as(scores), x.masked_fill(~sees[:, None], -_INF), "amax"
        )
        for x in (scores + off, scores - off)
    )
    is_there = block < num_blocks
    _assert_best(lists, most, least, is_there, is_there & (block >= num_blocks - local_blocks), count)


def _exact_scores(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (queries, lists, keys) in float64, by how much they may be off in float32, and which keys are seen."""
    number = torch.arange(len(k), device=k.device)
    sees = (number >= bounds[:, :1]) & (number < bounds[:, 1:])
    k = torch.where(sees.any(0)[:, None], k, 0)
    dots = torch.einsum("qhd,kd->qhk", q.double(), k.double())
    sizes = torch.einsum("qhd,kd->qhk", q.double().abs(), k.double().abs())
    if weights is not None:
        dots = torch.einsum("qhk,qh->qk", dots.relu(), weights.double())[:, None]
        sizes = torch.einsum("qhk,qh->qk", sizes, weights.double().abs())[:, None]
    return dots, sizes * (q.shape[1] + q.shape[2]) * 2.0**-23, sees


def _assert_best(
    lists: torch.Tensor, most: torch.Tensor, least: torch.Tensor, is_there: torch.Tensor, is_local: torch.Tensor,
    count: int,
) -> None:  # fmt: skip
    """``most`` and ``least``: scores (queries, lists, entries), were they off. ``is_there`` and ``is_local`` (queries,
    entries): what may be chosen, and what has to be."""
    is_chosen = torch.zeros(most.shape, dtype=torch.bool, device=most.device)
    assert lists.shape == (*most.shape[:2], count)
    for row, entries in enumerate(lists.tolist()):
        size = min(count, int(is_there[row].sum()))
        for place, chosen in enumerate(entries):
            named = [x for x in chosen if x >= 0]
            assert named == sorted(set(named)) and chosen[len(named) :] == [-1] * (count - len(named)), f"query {row}"
            assert len(named) == size, f"query {row} has {len(named)} entries and not {size}"
            is_chosen[row, place, named] = True
    assert not (is_chosen & ~is_there[:, None]).any(), "an entry outside the bounds"
    assert (is_chosen | ~is_local[:, None]).all(), "a local block was left out"
    worst = most.masked_fill(~is_chosen | is_local[:, None], _INF).amin(2)
    best = least.masked_fill(is_chosen | ~is_there[:, None], -_INF).amax(2)
    assert (worst >= best).all(), (
        f"better keys were left out for queries {(worst < best).any(1).nonzero().flatten().tolist()}"
    )
