# SPDX-License-Identifier: Apache-2.0
"""What the backends share that call the kernels of a published wheel: ``cudnn_flex`` and ``fa4``.

Such kernels take (batch, tokens, heads, head dim) tensors in 16 bits, and so they give partial results rounded to the
dtype of q. A sink joins by its share of the softmax, which is exact.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
import torch

from magi_attention.common.slices import SliceTable, trim
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.reference.correction import sink_bwd_from_delta
from magi_attention.kernels.reference.operands import (
    check_operands,
    finish_backward,
    finish_forward,
    row_delta,
    unseen_rows,
)
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Final, Grads, Operands, Partial, Problem

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
DTYPES = (torch.bfloat16, torch.float16)
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WheelKernels(Protocol):
    """The kernels of a wheel for masks with at least one pair. All tensors are contiguous, and 0 in rows that take part
    in nothing. ``_BTHD`` is (1, tokens, heads, head dim), ``_BHT`` (1, heads, tokens)."""

    def why_not_own(self, p: Problem) -> str | None:
        """Why not for ``p``, whose limits for all wheels are kept; see ``Backend.why_not``."""
        ...

    def attend(
        self, qkv: QKV, slices: SliceTable, options: AttnOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(out_BTHD, lse_BHT, max_logits (heads,) or None)``."""
        ...

    def differentiate(
        self, qkv: QKV, out_BTHD: torch.Tensor, dout_BTHD: torch.Tensor, lse_BHT: torch.Tensor,
        slices: SliceTable, options: AttnOptions,
    ) -> QKV:  # fmt: skip
        """``(dq_BTHD, dk_BTHD, dv_BTHD)``."""
        ...


class WheelBackend(WheelKernels):
    """A ``FinalBackend`` on the kernels of a wheel, called ``title`` in reasons."""

    title: ClassVar[str]
    preference_on_blackwell: ClassVar[int]

    def preference(self, problem: Problem) -> int:
        """Ahead of our portable kernels on 10.x, which do without that GPU's own matrix instructions."""
        is_blackwell = problem.capability is not None and problem.capability[0] == 10
        return self.preference_on_blackwell if is_blackwell else 0

    def why_not(self, problem: Problem) -> str | None:
        """See ``Backend.why_not``."""
        return self._why_not_any(problem) or self.why_not_own(problem)

    def _why_not_any(self, p: Problem) -> str | None:
        """The limits that the kernels of all wheels have."""
        if p.device_type != "cuda":
            return f"{self.title} runs on NVIDIA GPUs, not on {p.device_type} tensors."
        if p.capability not in CAPABILITIES:
            return f"{self.title} is used on 9.0, 10.0 and 10.3, not on {p.capability}."
        if p.dtype not in DTYPES:
            return f"{self.title} computes bfloat16 and float16, not {p.dtype}."
        if p.num_heads_kv == 0 or p.num_heads_q % p.num_heads_kv:
            return f"{p.num_heads_q} query heads are no multiple of {p.num_heads_kv} kv heads."
        if p.options.dropout_p:
            return f"{self.title} has no dropout."
        if p.options.sm_margin:
            return f"{self.title} leaves no SMs free (sm_margin)."
        if not p.options.softmax_scale > 0:
            return f"softmax_scale is {p.options.softmax_scale}; this backend needs a positive one."
        return None

    @torch.no_grad()
    def forward(self, x: Operands, init: Partial | None = None) -> Partial:
        """See ``Backend.forward``. out is rounded to the dtype of q before anything is merged."""
        new = self._partial(x)
        new.out = new.out.float()
        return finish_forward(new, x, init)

    @torch.no_grad()
    def forward_final(self, x: Operands) -> Final:
        """See ``FinalBackend.forward_final``. With a sink out is rounded twice."""
        new = self._partial(x)
        if x.sink is not None:
            new.out = new.out.float()
            new = finish_forward(new, x, None)
        return new.out.to(x.q.dtype), new.lse, new.max_logits

    def _partial(self, x: Operands) -> Partial:
        """Without a sink; out in the dtype of q."""
        _refuse(x.dropout)
        check_operands(x)
        if _has_no_pairs(x):
            return _nothing(x)
        with torch.cuda.device_of(x.q):
            out, lse, top = self.attend(_batched(x), x.slices, x.options)
        return Partial(out[0], lse[0].t().contiguous(), top)

    @torch.no_grad()
    def backward(self, x: BackwardOperands, init: Grads | None = None) -> Grads:
        """See ``Backend.backward``. The kernel works delta out of ``out``; a given ``delta`` is used for sinks only."""
        grads = self.backward_final(x._replace(sink=None, delta=None))
        grads.dq, grads.dk, grads.dv = grads.dq.float(), grads.dk.float(), grads.dv.float()
        if x.sink is not None:
            grads.dsink = _sink_gradient(x, x.sink)
        return finish_backward(grads, init)

    @torch.no_grad()
    def backward_final(self, x: BackwardOperands) -> Grads:
        """See ``FinalBackend.backward_final``."""
        _refuse(x.dropout)
        if x.delta is not None:
            raise ContractError("Backends on wheels take no delta; give out alone, or use backend ffa.")
        check_operands(x)
        if _has_no_pairs(x):
            grads = Grads(*(torch.zeros_like(like) for like in (x.q, x.k, x.v)))
        else:
            rows = unseen_rows(x.slices, x.q.shape[0], x.k.shape[0])[0]
            out_BTHD, dout_BTHD = (_blank(values.to(x.q.dtype), rows)[None] for values in (x.out, x.dout))
            lse_BHT = x.lse.float().t().contiguous()[None]
            with torch.cuda.device_of(x.q):
                made = self.differentiate(_batched(x), out_BTHD, dout_BTHD, lse_BHT, x.slices, x.options)
            grads = Grads(*(grad[0] for grad in made))
        if x.sink is not None:
            grads.dsink = _sink_gradient(x, x.sink)
        return grads


def _refuse(dropout: DropoutMask | None) -> None:
    if dropout is not None:
        raise ContractError("The kernels of this wheel have no dropout; ask why_not before a call.")


def _sink_gradient(x: BackwardOperands, sink: torch.Tensor) -> torch.Tensor:
    # A row that sees no key in any stage has an out of 0 and so a delta of 0, whatever its dout holds.
    delta = row_delta(x.out, x.dout, x.delta).masked_fill((x.out == 0).all(-1), 0.0)
    return sink_bwd_from_delta(sink, x.lse.float(), delta, x.options.sink_layout)


def _batched(x: Operands | BackwardOperands) -> QKV:
    """(1, T, H, D) contiguous; rows that take part in nothing are 0, because a weight of 0 leaves a NaN a NaN."""
    q_unseen, k_unseen = unseen_rows(x.slices, x.q.shape[0], x.k.shape[0])
    return _blank(x.q, q_unseen)[None], _blank(x.k, k_unseen)[None], _blank(x.v, k_unseen)[None]


def _blank(x: torch.Tensor, rows: np.ndarray | None) -> torch.Tensor:
    """``x``, contiguous and at a multiple of 128 bytes, with these rows 0."""
    if rows is None:
        return x.contiguous() if not x.data_ptr() % 128 else x.clone(memory_format=torch.contiguous_format)
    blanked = x.clone(memory_format=torch.contiguous_format)
    blanked[torch.from_numpy(rows).to(x.device)] = 0
    return blanked


def _has_no_pairs(x: Operands | BackwardOperands) -> bool:
    return not x.q.shape[0] or not x.k.shape[0] or not len(trim(x.slices.array))


def _nothing(x: Operands) -> Partial:
    """What queries get that see no key."""
    q, (rows, heads) = x.q, x.q.shape[:2]
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    top = torch.full((heads,), float("-inf"), dtype=torch.float32, device=q.device)
    out = torch.zeros((rows, heads, x.v.shape[2]), dtype=q.dtype, device=q.device)
    return Partial(out, lse, top if x.options.return_max_logits else None)
