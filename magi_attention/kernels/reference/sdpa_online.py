# SPDX-License-Identifier: Apache-2.0
"""Blocked reference backend with online softmax: O(tokens) memory, forbidden tiles are skipped.

Forward, per query block, over its key tiles in ascending order (m running maximum, l running sum):

    s = q k^T    m' = max(m, rowmax s)    p = exp(s - m')    l = l e^(m - m') + rowsum p
    o = o e^(m - m') + p v                at the end  out = o / l,  lse = m + log l

Backward, per tile: ``p = exp(s - lse)``, then the formulas of ``sdpa.py``. Tiles are visited in a fixed order
by one thread of control, so results are bitwise repeatable.

Exponentials are taken to base 2 with ``log2(e)`` folded into q: torch's float32 ``exp2`` takes 0.24 ns per
element on one CPU core where ``exp`` takes 0.75, and is as exact (measured on an EPYC core, torch 2.13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.reference.block_iter import KeyTile, TileMask, block_walk
from magi_attention.kernels.reference.correction import sink_bwd_from_delta
from magi_attention.kernels.reference.operands import (
    as_kernel,
    check_operands,
    finish_backward,
    finish_forward,
    heads_first,
    reference_why_not,
    row_delta,
    tokens_first,
    unseen_rows,
)
from magi_attention.kernels.types import AttnOptions, Grads, Partial, Problem, accumulation_dtype, check_dropout

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class SdpaOnlineBackend:
    """The blocked torch backend, ``"sdpa_ol"``. Block sizes are in tokens; the defaults suit CPU caches."""

    block_q: int = 256
    block_k: int = 512
    name: str = "sdpa_ol"

    def __post_init__(self) -> None:
        if self.block_q < 1 or self.block_k < 1:
            raise ContractError(f"Block sizes {self.block_q} x {self.block_k} are invalid; give positive sizes.")

    def why_not(self, problem: Problem) -> str | None:
        return reference_why_not(problem)

    @as_kernel
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        init: Partial | None = None,
        dropout: DropoutMask | None = None,
    ) -> Partial:
        """See ``Backend.forward``."""
        check_operands(q, k, v, slices)
        check_dropout(options, dropout, q, k)
        tq, hq, _ = q.shape
        run = _Forward(self, q, k, v, slices, options, dropout)
        new = Partial(run.k_HTD.new_zeros(tq, hq, v.shape[2]), run.k_HTD.new_full((tq, hq), float("-inf")), None)
        if options.return_max_logits:
            new.max_logits = new.lse.new_full((hq,), float("-inf"))
        for block in block_walk(slices, self.block_q, self.block_k):
            run.block(block.q0, block.q1, block.tiles, new)
        return finish_forward(new, options, sink, init)

    @as_kernel
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        delta: torch.Tensor | None = None,
        init: Grads | None = None,
        dropout: DropoutMask | None = None,
    ) -> Grads:
        """See ``Backend.backward``."""
        check_operands(q, k, v, slices)
        check_dropout(options, dropout, q, k)
        delta = row_delta(out, dout, delta)
        run = _Backward(self, dout, q, k, v, lse, delta, slices, options, dropout)
        for block in block_walk(slices, self.block_q, self.block_k):
            run.block(block.q0, block.q1, block.tiles)
        grads = Grads(
            dq=tokens_first(run.dq_HGTD.mul_(options.softmax_scale)),
            dk=run.dk_HTD.mul_(options.softcap or _LN2).transpose(0, 1).contiguous(),  # scale / q_factor
            dv=run.dv_HTD.transpose(0, 1).contiguous(),
        )
        grads.delta = delta
        if sink is not None:
            grads.dsink = sink_bwd_from_delta(sink, lse.to(delta.dtype), delta, options.sink_layout)
        return finish_backward(grads, init)


class _Tiles:
    """What forward and backward share: operands heads first, one tile buffer set, logits of a tile."""

    def __init__(
        self,
        sizes: SdpaOnlineBackend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        dropout: DropoutMask | None,
        buffers: int,
        transposed: bool,
    ) -> None:
        heads, self.dropout = k.shape[1], dropout
        self.q_unseen, self.k_unseen = unseen_rows(slices, q.shape[0], k.shape[0])
        cap = options.softcap
        # With a cap the product is s / cap; without, it is s in base 2 already.
        q_factor = options.softmax_scale / cap if cap > 0 else options.softmax_scale * _LOG2E
        self.cap_base2 = cap * _LOG2E if cap > 0 else None
        self.q_HGTD = heads_first(q, heads, self.q_unseen).mul_(q_factor)
        self.k_HTD = heads_first(k, heads, self.k_unseen)[:, 0]
        self.v_HTD = heads_first(v, heads, self.k_unseen)[:, 0]
        self.heads, self.group = heads, q.shape[1] // heads
        block_q, block_k = min(sizes.block_q, q.shape[0]), min(sizes.block_k, k.shape[0])
        self.transposed = transposed
        self.mask = TileMask(block_q, block_k, self.k_HTD.dtype, q.device, transposed)
        # One set of buffers for all tiles: fresh ones of this size cost page faults on every tile.
        size = heads * self.group * block_q * block_k
        self._buffers = [self.k_HTD.new_empty(size) for _ in range(buffers)]

    def buffer(self, which: int, *shape: int) -> torch.Tensor:
        return self._buffers[which][: math.prod(shape)].view(shape)

    def rows(self, x_HGTD: torch.Tensor, q0: int, q1: int) -> torch.Tensor:
        """(Hk, G * rows, D): the rows of all query heads of a kv head side by side, one matmul for all."""
        return x_HGTD[:, :, q0:q1].reshape(self.heads, self.group * (q1 - q0), x_HGTD.shape[3])

    def apply_mask(self, s: torch.Tensor, tile: KeyTile, pieces: np.ndarray, rows: int) -> None:
        keys = tile.k1 - tile.k0
        ceiling = self.mask.ceiling(pieces, rows, keys)
        if self.transposed:
            view, ceiling = s.view(self.heads, keys, self.group, rows), ceiling[:, None]
        else:
            view = s.view(self.heads, self.group, rows, keys)
        torch.minimum(view, ceiling, out=view)

    def drop_weights(self, dropout: DropoutMask, q0: int, q1: int, tile: KeyTile) -> torch.Tensor:
        """What dropout multiplies the weights of a tile by, in the layout of its scores."""
        weights = dropout.weights(self.heads * self.group, slice(q0, q1), slice(tile.k0, tile.k1))
        rows = weights.to(self.k_HTD.dtype).view(self.heads, self.group * (q1 - q0), -1)
        return rows.transpose(1, 2) if self.transposed else rows


class _Forward(_Tiles):
    def __init__(
        self,
        sizes: SdpaOnlineBackend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        dropout: DropoutMask | None,
    ) -> None:
        super().__init__(sizes, q, k, v, slices, options, dropout, buffers=1, transposed=False)

    def block(self, q0: int, q1: int, tiles: tuple[KeyTile, ...], result: Partial) -> None:
        q_HRD = self.rows(self.q_HGTD, q0, q1)
        m_old: torch.Tensor | None = None
        m: torch.Tensor
        mass: torch.Tensor
        acc: torch.Tensor
        for tile in tiles:
            s = self.buffer(0, *q_HRD.shape[:2], tile.k1 - tile.k0)
            torch.bmm(q_HRD, self.k_HTD[:, tile.k0 : tile.k1].transpose(1, 2), out=s)
            if self.cap_base2 is not None:
                s.tanh_().mul_(self.cap_base2)
            if tile.pieces is not None:
                self.apply_mask(s, tile, tile.pieces, q1 - q0)
            m = s.amax(-1, keepdim=True)
            if tile.pieces is not None:
                # A row may be empty in this tile: a finite maximum makes its weights exp2(-inf) = 0.
                m.clamp_(min=torch.finfo(m.dtype).min)
            if m_old is not None:
                m = torch.maximum(m, m_old)
            p = s.sub_(m).exp2_()
            v_HKD, in_tile = self.v_HTD[:, tile.k0 : tile.k1], p.sum(-1, keepdim=True)
            if self.dropout is not None:
                p.mul_(self.drop_weights(self.dropout, q0, q1, tile))
            if m_old is None:
                mass, acc = in_tile, torch.bmm(p, v_HKD)
            else:
                decay = m_old.sub_(m).exp2_()
                mass.mul_(decay).add_(in_tile)
                acc.mul_(decay).baddbmm_(p, v_HKD)
            m_old = m
        self._store(q0, q1, m, mass, acc, result)

    def _store(self, q0: int, q1: int, m: torch.Tensor, mass: torch.Tensor, acc: torch.Tensor, result: Partial) -> None:
        shape = (self.heads, self.group, q1 - q0)
        heads = self.heads * self.group
        # The mass is >= 1 for a row with a key (its maximum has weight 1) and 0 for one without.
        acc.div_(mass.clamp(min=1.0))
        m.masked_fill_(mass == 0, float("-inf")).mul_(_LN2)
        result.out[q0:q1] = acc.view(*shape, -1).permute(2, 0, 1, 3).reshape(q1 - q0, heads, -1)
        result.lse[q0:q1] = mass.log_().add_(m).view(shape).permute(2, 0, 1).reshape(q1 - q0, heads)
        if result.max_logits is not None:
            top = m.view(heads, q1 - q0).amax(1)
            torch.maximum(result.max_logits, top, out=result.max_logits)


class _Backward(_Tiles):
    """Tiles are (keys, rows): then two of the three gradient products need no transposed left operand."""

    def __init__(
        self,
        sizes: SdpaOnlineBackend,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        dropout: DropoutMask | None,
    ) -> None:
        buffers = 2 if options.softcap == 0 else 3
        super().__init__(sizes, q, k, v, slices, options, dropout, buffers=buffers, transposed=True)
        heads, acc = self.heads, accumulation_dtype(q.dtype)
        self.do_HGTD = heads_first(dout.to(acc), heads, self.q_unseen)
        # A row with lse -inf sees nothing, so it is among the blanked ones and its shift is 0.
        minus_lse = lse.to(acc) * -_LOG2E
        self.minus_lse_HGTD = heads_first(minus_lse[..., None], heads, self.q_unseen)
        self.minus_delta_HGTD = heads_first(-delta[..., None], heads, self.q_unseen)
        self.dq_HGTD = torch.zeros_like(self.q_HGTD)
        self.dk_HTD = torch.zeros_like(self.k_HTD)
        self.dv_HTD = torch.zeros_like(self.v_HTD)

    def block(self, q0: int, q1: int, tiles: tuple[KeyTile, ...]) -> None:
        q_HRD = self.rows(self.q_HGTD, q0, q1)
        do_HRD = self.rows(self.do_HGTD, q0, q1)
        minus_lse = self.rows(self.minus_lse_HGTD, q0, q1).transpose(1, 2)
        minus_delta = self.rows(self.minus_delta_HGTD, q0, q1).transpose(1, 2)
        dq_HRD = torch.zeros_like(q_HRD)
        for tile in tiles:
            shape = (self.heads, tile.k1 - tile.k0, q_HRD.shape[1])
            k_HKD = self.k_HTD[:, tile.k0 : tile.k1]
            v_HKD = self.v_HTD[:, tile.k0 : tile.k1]
            slope = None
            s = self.buffer(0, *shape)
            if self.cap_base2 is None:
                torch.baddbmm(minus_lse, k_HKD, q_HRD.transpose(1, 2), out=s)
            else:
                torch.bmm(k_HKD, q_HRD.transpose(1, 2), out=s)
                slope = torch.mul(s.tanh_(), s, out=self.buffer(2, *shape)).neg_().add_(1.0)
                s.mul_(self.cap_base2).add_(minus_lse)
            if tile.pieces is not None:
                self.apply_mask(s, tile, tile.pieces, q1 - q0)
            p, ds = s.exp2_(), self.buffer(1, *shape)
            if self.dropout is None:
                self.dv_HTD[:, tile.k0 : tile.k1].baddbmm_(p, do_HRD)
                torch.baddbmm(minus_delta, v_HKD, do_HRD.transpose(1, 2), out=ds)
            else:
                weights = self.drop_weights(self.dropout, q0, q1, tile)
                self.dv_HTD[:, tile.k0 : tile.k1].baddbmm_(p * weights, do_HRD)
                torch.bmm(v_HKD, do_HRD.transpose(1, 2), out=ds).mul_(weights).add_(minus_delta)
            ds.mul_(p)
            if slope is not None:
                ds.mul_(slope)
            self.dk_HTD[:, tile.k0 : tile.k1].baddbmm_(ds, q_HRD)
            dq_HRD.baddbmm_(ds.transpose(1, 2), k_HKD)
        self.dq_HGTD[:, :, q0:q1] = dq_HRD.view(self.heads, self.group, q1 - q0, -1)
