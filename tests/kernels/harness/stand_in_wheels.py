# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the wheels of ``cudnn_flex`` and ``fa4`` on the CPU: attention in float32 by what a kernel gets of the
mask alone."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import torch

from magi_attention.kernels.fa4.wheel import Wheel


def _grouped(x, q):
    return x[0].float().repeat_interleave(q.shape[2] // x.shape[2], 1)


def _scores(q, k, seen, scale):
    return (torch.einsum("qhd,khd->hqk", q[0].float(), _grouped(k, q)) * scale).masked_fill(~seen, -torch.inf)


def forward(q, k, v, seen, scale):
    """(out (1, T, H, D), lse (1, H, T), scores (H, Tq, Tk)) of the dense mask ``seen``."""
    s = _scores(q, k, seen, scale)
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(s - lse[..., None]))
    return torch.einsum("hqk,khd->qhd", p, _grouped(v, q)).to(q.dtype)[None], lse[None], s


def backward(q, k, v, out, dout, lse, seen, scale):
    """(dq, dk, dv), each (1, T, H, D)."""
    s, g, lse = _scores(q, k, seen, scale), dout[0].float(), lse[0][..., None]
    p = torch.where(lse == -torch.inf, 0.0, torch.exp(s - lse))
    delta = (out[0].float() * g).sum(-1).T[..., None]
    ds = p * (torch.einsum("qhd,khd->hqk", g, _grouped(v, q)) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, _grouped(k, q))
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q[0].float()), torch.einsum("hqk,qhd->khd", p, g)
    return dq[None], *(x.unflatten(1, (k.shape[2], -1)).sum(2)[None] for x in (dk, dv))


class CudnnFlex:
    """``cudnn.flex_attention``, which gets endpoints; ``plans`` says of each plan whether it has a backward."""

    def __init__(self) -> None:
        self.plans: list[bool] = []

    def create_mask_plan(self, endpoints, q, k, v, *, build_backward):
        assert endpoints.dtype == torch.int32 and endpoints.shape[1] % 2 == 1 and q.dim() == 4
        self.plans.append(build_backward)
        seen = (endpoints[0].T[:, :, None] > torch.arange(k.shape[1])).sum(1) % 2 == 1
        return SimpleNamespace(seen=seen, has_backward=build_backward)

    def flex_attn_func(self, q, k, v, *, mask_plan, softmax_scale, return_lse, return_max_logit):
        out, lse, s = forward(q, k, v, mask_plan.seen, softmax_scale)
        return out, lse, *([s.amax((1, 2))] if return_max_logit else [])

    def FlexAttentionBwd(self, *operands, deterministic):  # noqa: N802, the wheel's name
        def execute(q, k, v, out, dout, lse, dq, dk, dv, plan, *, workspace, softmax_scale):
            assert plan.has_backward and workspace.numel() == 0 and out.dtype == q.dtype == dout.dtype
            for into, x in zip((dq, dk, dv), backward(q, k, v, out, dout, lse, plan.seen, softmax_scale)):
                into.copy_(x)

        return SimpleNamespace(check_support=bool, compile=bool, workspace_size=0, execute=execute)


_NAMES = "mask_block_cnt mask_block_idx full_block_cnt full_block_idx block_size"
_BlockLists = namedtuple("_BlockLists", _NAMES.split())


class FlashAttention4:
    """flash-attn-4, which gets lists of blocks, by query for the forward and by key for the backward, and endpoints."""

    def as_wheel(self) -> Wheel:
        return Wheel(self._forward, self._backward, _BlockLists, lambda num_endpoints: num_endpoints)

    def _forward(
        self, q, k, v, *, softmax_scale, softcap, pack_gqa, return_lse, mask_mod, aux_tensors, block_sparse_tensors
    ):
        seen = self._seen(q, k, mask_mod, aux_tensors, block_sparse_tensors, False)
        return *forward(q, k, v, seen, softmax_scale)[:2], None

    def _backward(
        self, q, k, v, out, dout, lse, *, softmax_scale, softcap, mask_mod, aux_tensors, block_sparse_tensors
    ):
        seen = self._seen(q, k, mask_mod, aux_tensors, block_sparse_tensors, True)
        return backward(q, k, v, out, dout, lse, seen, softmax_scale)

    def _seen(self, q, k, num_endpoints, aux_tensors, lists, is_transposed):
        (ends,), size, (total_q, total_k) = aux_tensors, lists.block_size, (q.shape[1], k.shape[1])
        assert ends.dtype == torch.int32 and len(ends) == num_endpoints
        by_row = (ends[:, :total_q, None] <= torch.arange(total_k)).sum(0) % 2 == 1
        seen = torch.zeros(total_q, total_k, dtype=torch.bool)
        for counts, indices, is_full in (
            (lists.mask_block_cnt, lists.mask_block_idx, False), (lists.full_block_cnt, lists.full_block_idx, True),
        ):  # fmt: skip
            assert counts.dtype == indices.dtype == torch.int32 and counts.shape[:2] == indices.shape[:2] == (1, 1)
            for row, count in enumerate(counts[0, 0].tolist()):
                for column in indices[0, 0, row, :count].tolist():
                    m, n = (column, row) if is_transposed else (row, column)
                    block = slice(m * size[0], (m + 1) * size[0]), slice(n * size[1], (n + 1) * size[1])
                    assert not seen[block].any(), "a block is visited twice"
                    seen[block] = True if is_full else by_row[block]
        return seen
