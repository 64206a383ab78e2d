# SPDX-License-Identifier: Apache-2.0
"""The loss that an indexer learns from, and its gradients, block by block.

For a query with scores I_s and target p_s = P_s / c, where P_s is the sum of attention's probabilities over heads and c
that of P_s over keys, the divergence is sum_s p_s (log p_s - I_s) + log sum_s exp I_s. So one pass over the keys will
do, with c, sum P log P, sum P I and a running logsumexp of I. The gradient is softmax(I)_s - p_s for each score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from magi_attention.kernels.indexer.visible import Blocks, row_blocks, visible_keys
from magi_attention.kernels.types import accumulation_dtype

_NEG_INF = float("-inf")


@dataclass(frozen=True)
class Problem:
    """Tensors as of ``api.indexer_kl``. Keys of a query are those within ``bounds`` int64 (T, 2), or those of ``lists``
    int (T, N), in which no key is twice; the other one is None."""

    q_index: torch.Tensor
    k_index: torch.Tensor
    weights: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    bounds: torch.Tensor | None
    lists: torch.Tensor | None
    scale: float
    softcap: float
    blocks: Blocks


@dataclass(frozen=True)
class _Tile:
    """Some queries against some keys. ``at``: rows of the keys, a slice or (rows, keys); ``k_index`` these, (keys, D)
    or (rows, keys, D). ``dots`` (rows, H, keys); ``scores``, ``is_visible`` and ``target``, which is not
    normalised, (rows, keys)."""

    at: Any
    k_index: torch.Tensor
    dots: torch.Tensor
    scores: torch.Tensor
    target: torch.Tensor
    is_visible: torch.Tensor


class _Rows:
    """Some queries. Those without an lse see nothing, and what is in them, which may be pad, is not looked at."""

    def __init__(self, of: Problem, rows: slice, low: int, high: int) -> None:
        self.of, self.rows, self.low, self.high = of, rows, low, high
        self.acc = accumulation_dtype(of.q_index.dtype)
        self.is_alive = (of.lse[rows] != _NEG_INF).all(1)
        is_dead = ~self.is_alive[:, None]
        self.q_index = of.q_index[rows].to(self.acc).masked_fill(is_dead[..., None], 0)
        self.weights = of.weights[rows].to(self.acc).masked_fill(is_dead, 0)
        q = of.q[rows].to(self.acc).masked_fill(is_dead[..., None], 0) * of.scale
        self.q = q.unflatten(1, (of.k.shape[1], -1))
        self.lse = of.lse[rows].to(self.acc).masked_fill(is_dead, 0).unflatten(1, (of.k.shape[1], -1))
        self.by_row = "" if of.lists is None else "r"

    def tiles(self) -> Iterator[_Tile]:
        for start in range(self.low, self.high, self.of.blocks.keys):
            yield self._tile(start, min(start + self.of.blocks.keys, self.high))

    def _tile(self, start: int, stop: int) -> _Tile:
        at: Any = slice(start, stop)
        if self.of.lists is None:
            assert self.of.bounds is not None
            is_visible = visible_keys(self.of.bounds[self.rows], start, stop)[0]
        else:
            keys = self.of.lists[self.rows, start:stop]
            at, is_visible = keys.clamp(min=0).long(), keys >= 0
        is_visible = is_visible & self.is_alive[:, None]
        k_index, k = self.of.k_index[at].to(self.acc), self.of.k[at].to(self.acc)
        dots = torch.einsum(f"rhd,{self.by_row}bd->rhb", self.q_index, k_index)
        scores = torch.einsum("rhb,rh->rb", dots.relu(), self.weights)
        logits = torch.einsum(f"rkgd,{self.by_row}bkd->rkgb", self.q, k)
        if self.of.softcap:
            logits = self.of.softcap * torch.tanh(logits / self.of.softcap)
        target = (logits - self.lse[..., None]).exp_().sum((1, 2)).masked_fill_(~is_visible, 0)
        return _Tile(at, k_index, dots, scores, target, is_visible)


def _all_rows(of: Problem) -> Iterator[_Rows]:
    if of.bounds is not None:
        for rows, low, high in row_blocks(of.bounds, of.blocks.rows):
            yield _Rows(of, rows, low, high)
    elif of.lists is not None:
        for start in range(0, len(of.lists), of.blocks.rows):
            yield _Rows(of, slice(start, start + of.blocks.rows), 0, of.lists.shape[1])


def kl_forward(of: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The divergence of each query, the logsumexp of its scores and the sum of its targets, (T,) each."""
    acc = accumulation_dtype(of.q_index.dtype)
    loss, lse_index, mass = (torch.zeros(len(of.q_index), dtype=acc, device=of.q_index.device) for _ in range(3))
    for part in _all_rows(of):
        top = torch.full_like(loss[part.rows], _NEG_INF)
        total, targets, entropy, cross = torch.zeros(4, len(top), dtype=acc, device=top.device)
        for tile in part.tiles():
            above = torch.maximum(top, tile.scores.masked_fill(~tile.is_visible, _NEG_INF).amax(1))
            base = above.masked_fill(above == _NEG_INF, 0)
            shares = (tile.scores - base[:, None]).masked_fill(~tile.is_visible, _NEG_INF).exp_()
            total, top = total * (top - base).exp() + shares.sum(1), above
            targets = targets + tile.target.sum(1)
            entropy = entropy + torch.xlogy(tile.target, tile.target).sum(1)
            cross = cross + (tile.target * tile.scores).sum(1)
        lse = top + total.log()
        value = (entropy - cross) / targets - targets.log() + lse
        loss[part.rows] = torch.where(targets > 0, value, 0)
        lse_index[part.rows], mass[part.rows] = lse, targets
    return loss, lse_index, mass


def kl_backward(
    of: Problem, grad: torch.Tensor, lse_index: torch.Tensor, mass: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q_index, k_index and weights, from those of the divergences and what ``kl_forward`` returned."""
    acc = accumulation_dtype(of.q_index.dtype)
    dq, dk, dw = (torch.zeros_like(x, dtype=acc) for x in (of.q_index, of.k_index, of.weights))
    for part in _all_rows(of):
        targets = mass[part.rows, None]
        for tile in part.tiles():
            softmax = (tile.scores - lse_index[part.rows, None]).exp_()
            slope = (softmax - tile.target / targets) * grad[part.rows, None].to(acc)
            slope = slope.masked_fill_(~(tile.is_visible & (targets > 0)), 0)
            dw[part.rows] += torch.einsum("rb,rhb->rh", slope, tile.dots.relu())
            inner = slope[:, None] * part.weights[..., None] * (tile.dots > 0)
            dq[part.rows] += torch.einsum(f"rhb,{part.by_row}bd->rhd", inner, tile.k_index)
            share = torch.einsum(f"rhb,rhd->{part.by_row}bd", inner, part.q_index)
            if of.lists is None:
                dk[tile.at] += share
            elif dk.is_cuda:  # where index_add_ adds in any order, and this one sorts
                dk.index_put_((tile.at,), share, accumulate=True)
            else:
                dk.index_add_(0, tile.at.flatten(), share.flatten(0, 1))
    return dq.to(of.q_index.dtype), dk.to(of.k_index.dtype), dw.to(of.weights.dtype)


__all__ = ["Problem", "kl_backward", "kl_forward"]
