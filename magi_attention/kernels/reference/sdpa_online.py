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

import torch

from magi_attention.common.disjoint import overlap_of
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.reference.backend import ReferenceBackend
from magi_attention.kernels.reference.block_iter import KeyTile, TileMask, block_walk
from magi_attention.kernels.reference.numerics import LoadedOperands, masked_product, own_or_given
from magi_attention.kernels.reference.operands import tokens_first
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Operands, Partial, accumulation_dtype

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class SdpaOnlineBackend(ReferenceBackend):
    """The blocked torch backend, ``"sdpa_ol"``. Block sizes are in tokens; the defaults suit CPU caches."""

    block_q: int = 256
    block_k: int = 512
    name: str = "sdpa_ol"

    def __post_init__(self) -> None:
        if self.block_q < 1 or self.block_k < 1:
            raise ContractError(f"Block sizes {self.block_q} x {self.block_k} are invalid; give positive sizes.")

    def _attend(self, x: Operands, loaded: LoadedOperands) -> Partial:
        tq, hq, _ = x.q.shape
        run = _Forward(self, loaded, x.slices, x.options, x.dropout)
        acc = accumulation_dtype(x.q.dtype)
        out, lse = x.q.new_zeros(tq, hq, x.v.shape[2], dtype=acc), x.q.new_full((tq, hq), float("-inf"), dtype=acc)
        new = Partial(out, lse)
        if x.options.return_max_logits:
            new.max_logits = new.lse.new_full((hq,), float("-inf"))
        for block in block_walk(x.slices, self.block_q, self.block_k):
            run.block(block.q0, block.q1, block.tiles, new)
        return new

    def _differentiate(
        self, x: BackwardOperands, loaded: LoadedOperands
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options = x.options
        run = _Backward(self, loaded, x.slices, options, x.dropout, x.lse.dtype)
        for block in block_walk(x.slices, self.block_q, self.block_k):
            run.block(block.q0, block.q1, block.tiles)
        return (
            tokens_first(run.dq_HGTD.mul_(options.softmax_scale)),
            run.dk_HTD.mul_(options.softcap or _LN2).transpose(0, 1).contiguous(),  # scale / factor
            run.dv_HTD.transpose(0, 1).contiguous(),
        )


class _Tiles:
    """What forward and backward share: operands heads first, one tile buffer set, logits of a tile."""

    def __init__(
        self, sizes: SdpaOnlineBackend, operands: LoadedOperands, slices: SliceTable, options: AttnOptions,
        dropout: DropoutMask | None, buffers: int, transposed: bool,
    ) -> None:  # fmt: skip
        self.operands, self.dropout, self.transposed = operands, dropout, transposed
        self.k_HTD, self.v_HTD = operands.k_HTD, operands.v_HTD
        cap = options.softcap
        # With a cap the product is s / cap; without, it is s in base 2 already.
        self.q_HGTD = operands.q_HGTD.mul_(options.softmax_scale / cap if cap > 0 else options.softmax_scale * _LOG2E)
        self.cap_base2 = cap * _LOG2E if cap > 0 else None
        self.heads, self.group = self.q_HGTD.shape[:2]
        block_q, block_k = min(sizes.block_q, self.q_HGTD.shape[2]), min(sizes.block_k, self.k_HTD.shape[1])
        self.mask = TileMask(block_q, block_k, self.k_HTD.dtype, self.k_HTD.device, transposed)
        self.is_disjoint = overlap_of(slices) is None
        # One set of buffers for all tiles: fresh ones of this size cost page faults on every tile.
        size = self.heads * self.group * block_q * block_k
        self._buffers = [self.k_HTD.new_empty(size) for _ in range(buffers)]

    def buffer(self, which: int, *shape: int) -> torch.Tensor:
        return self._buffers[which][: math.prod(shape)].view(shape)

    def rows(self, x_HGTD: torch.Tensor, q0: int, q1: int) -> torch.Tensor:
        """(Hk, G * rows, D): the rows of all query heads of a kv head side by side, one matmul for all."""
        return x_HGTD[:, :, q0:q1].reshape(self.heads, self.group * (q1 - q0), x_HGTD.shape[3])

    def apply_mask(self, s: torch.Tensor, tile: KeyTile, rows: int) -> torch.Tensor | None:
        """Makes forbidden logits -inf. Returns where pairs are allowed if that must be known later, else None."""
        if tile.pieces is None:
            return None
        ceiling = self.mask.ceiling(tile.pieces, rows, tile.k1 - tile.k0)
        if not self.operands.is_tame:  # the minimum with NaN is NaN
            allowed = self.of_heads(ceiling > 0)
            s.masked_fill_(~allowed, float("-inf"))
            return allowed
        view, ceiling = self.by_group(s, rows), ceiling[:, None] if self.transposed else ceiling
        torch.minimum(view, ceiling, out=view)
        return None

    def count(self, p: torch.Tensor, tile: KeyTile, rows: int) -> None:
        """Multiplies weights by how many slices allow a pair."""
        if not self.is_disjoint and tile.pieces is not None:
            counts = self.mask.counts(tile.pieces, rows, tile.k1 - tile.k0)
            self.by_group(p, rows).mul_(counts[:, None] if self.transposed else counts)

    def by_group(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """A tile (Hk, G * rows, keys) or (Hk, keys, G * rows) with the query heads in a dimension of their own."""
        if self.transposed:
            return x.view(self.heads, x.shape[1], self.group, rows)
        return x.view(self.heads, self.group, rows, x.shape[2])

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """A tile (rows, keys) or (keys, rows) for the query heads of one kv head."""
        return x.repeat(1, self.group) if self.transposed else x.repeat(self.group, 1)

    def drop_weights(self, dropout: DropoutMask, q0: int, q1: int, tile: KeyTile) -> torch.Tensor:
        """What dropout multiplies the weights of a tile by, in the layout of its scores."""
        weights = dropout.weights(self.heads * self.group, slice(q0, q1), slice(tile.k0, tile.k1))
        rows = weights.to(self.k_HTD.dtype).view(self.heads, self.group * (q1 - q0), -1)
        return rows.transpose(1, 2) if self.transposed else rows


def _add_product(total: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, allowed: torch.Tensor | None) -> None:
    """``total += weights @ x``, over ``allowed`` pairs alone if these are told."""
    if allowed is None:
        total.baddbmm_(weights, x)
    else:
        total.add_(masked_product(weights, allowed, x))


class _Forward(_Tiles):
    def __init__(
        self, sizes: SdpaOnlineBackend, operands: LoadedOperands, slices: SliceTable, options: AttnOptions,
        dropout: DropoutMask | None,
    ) -> None:  # fmt: skip
        super().__init__(sizes, operands, slices, options, dropout, buffers=1, transposed=False)

    def block(self, q0: int, q1: int, tiles: tuple[KeyTile, ...], result: Partial) -> None:
        q_HRD = self.rows(self.q_HGTD, q0, q1)
        m_old: torch.Tensor | None = None
        m: torch.Tensor
        mass = q_HRD.new_zeros(*q_HRD.shape[:2], 1)
        acc = q_HRD.new_zeros(*q_HRD.shape[:2], self.v_HTD.shape[2])
        for tile in tiles:
            s = self.buffer(0, *q_HRD.shape[:2], tile.k1 - tile.k0)
            torch.bmm(q_HRD, self.k_HTD[:, tile.k0 : tile.k1].transpose(1, 2), out=s)
            if self.cap_base2 is not None:
                s.tanh_().mul_(self.cap_base2)
            allowed = self.apply_mask(s, tile, q1 - q0)
            m = s.amax(-1, keepdim=True)
            if tile.pieces is not None:
                # A row may be empty in this tile: a finite maximum makes its weights exp2(-inf) = 0.
                m.clamp_(min=torch.finfo(m.dtype).min)
            if m_old is not None:
                m = torch.maximum(m, m_old)
                decay = m_old.sub_(m).exp2_()
                mass.mul_(decay)
                acc.mul_(decay)
            p = s.sub_(m).exp2_()
            self.count(p, tile, q1 - q0)
            mass.add_(p.sum(-1, keepdim=True))
            if self.dropout is not None:
                p.mul_(self.drop_weights(self.dropout, q0, q1, tile))
            _add_product(acc, p, self.v_HTD[:, tile.k0 : tile.k1], allowed)
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
            top = m.view(heads, q1 - q0).amax(1).to(result.max_logits.dtype)
            torch.maximum(result.max_logits, top, out=result.max_logits)


class _Backward(_Tiles):
    """Tiles are (keys, rows): then two of the three gradient products need no transposed left operand."""

    def __init__(
        self, sizes: SdpaOnlineBackend, operands: LoadedOperands, slices: SliceTable, options: AttnOptions,
        dropout: DropoutMask | None, lse_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        buffers = 2 if options.softcap == 0 else 3
        super().__init__(sizes, operands, slices, options, dropout, buffers=buffers, transposed=True)
        self.lse_dtype = lse_dtype
        assert operands.do_HGTD is not None and operands.lse_HGT1 is not None and operands.delta_HGT1 is not None
        self.do_HGTD = operands.do_HGTD
        # A row with lse -inf sees nothing, so it is among the blanked ones and its shift is 0.
        self.minus_lse_HGTD = operands.lse_HGT1.mul_(-_LOG2E)
        self.minus_delta_HGTD = operands.delta_HGT1.neg_()
        self.dq_HGTD = torch.zeros_like(self.q_HGTD)
        self.dk_HTD = torch.zeros_like(self.k_HTD)
        self.dv_HTD = torch.zeros_like(self.v_HTD)

    def block(self, q0: int, q1: int, tiles: tuple[KeyTile, ...]) -> None:
        q_HRD = self.rows(self.q_HGTD, q0, q1)
        do_HRD = self.rows(self.do_HGTD, q0, q1)
        minus_lse = self.rows(self.minus_lse_HGTD, q0, q1).transpose(1, 2)
        minus_delta = self.rows(self.minus_delta_HGTD, q0, q1).transpose(1, 2)
        if self.operands.is_large:
            minus_lse = self._own_minus_lse(q_HRD, q1 - q0, tiles, minus_lse)
        dq_HRD = torch.zeros_like(q_HRD)
        for tile in tiles:
            k_HKD = self.k_HTD[:, tile.k0 : tile.k1]
            v_HKD = self.v_HTD[:, tile.k0 : tile.k1]
            s, slope, allowed = self._logits(q_HRD, q1 - q0, tile, minus_lse)
            p, ds = s.exp2_(), self.buffer(1, *s.shape)
            self.count(p, tile, q1 - q0)
            dv_HKD = self.dv_HTD[:, tile.k0 : tile.k1]
            if self.dropout is None:
                _add_product(dv_HKD, p, do_HRD, allowed)
                torch.baddbmm(minus_delta, v_HKD, do_HRD.transpose(1, 2), out=ds)
            else:
                weights = self.drop_weights(self.dropout, q0, q1, tile)
                _add_product(dv_HKD, p * weights, do_HRD, allowed)
                torch.bmm(v_HKD, do_HRD.transpose(1, 2), out=ds).mul_(weights).add_(minus_delta)
            ds.mul_(p)
            if slope is not None:
                ds.mul_(slope)
            _add_product(self.dk_HTD[:, tile.k0 : tile.k1], ds, q_HRD, allowed)
            _add_product(dq_HRD, ds.transpose(1, 2), k_HKD, None if allowed is None else allowed.T)
        self.dq_HGTD[:, :, q0:q1] = dq_HRD.view(self.heads, self.group, q1 - q0, -1)

    def _logits(
        self, q_HRD: torch.Tensor, rows: int, tile: KeyTile, shift: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Logits (Hk, keys, G * rows) plus ``shift`` (Hk, 1, G * rows), the slope of the softcap, allowed pairs."""
        k_HKD, slope = self.k_HTD[:, tile.k0 : tile.k1], None
        shape = (self.heads, tile.k1 - tile.k0, q_HRD.shape[1])
        s = self.buffer(0, *shape)
        if self.cap_base2 is None:
            torch.baddbmm(shift, k_HKD, q_HRD.transpose(1, 2), out=s)
        else:
            torch.bmm(k_HKD, q_HRD.transpose(1, 2), out=s)
            slope = torch.mul(s.tanh_(), s, out=self.buffer(2, *shape)).neg_().add_(1.0)
            s.mul_(self.cap_base2).add_(shift)
        return s, slope, self.apply_mask(s, tile, rows)

    def _own_minus_lse(
        self, q_HRD: torch.Tensor, rows: int, tiles: tuple[KeyTile, ...], given: torch.Tensor
    ) -> torch.Tensor:
        """``given`` to base 2, or minus the lse over these tiles where the two are the same but for rounding."""
        own = torch.full_like(given, float("-inf"))
        for tile in tiles:
            s, _, _ = self._logits(q_HRD, rows, tile, torch.zeros_like(given))
            top = s.amax(1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)
            p = s.sub_(top).exp2_()
            self.count(p, tile, rows)
            own = torch.logaddexp2(own, p.sum(1, keepdim=True).log2_().add_(top))
        return own_or_given(own.neg_(), given, self.lse_dtype)
