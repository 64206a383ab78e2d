# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as a backend, ``"ffa"``: flexible flash attention on Hopper GPUs.

Strides are honoured if the copy engine can: last dim 1, others multiples of 8 elements, base address a multiple
of 16 bytes. Other inputs are copied first; one log line says so.
"""

from __future__ import annotations

import torch

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.backward import BackwardCalls, Operands
from magi_attention.kernels.ffa.forward import Final, ForwardCalls
from magi_attention.kernels.ffa.host_ranges import HostRanges
from magi_attention.kernels.ffa.launch_cache import PreparedCall
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.ffa.operands import (
    DTYPES,
    MAX_HEAD_DIM,
    CudaRuntime,
    check_buffer,
    minus_inf,
)
from magi_attention.kernels.ffa.peer_kv import RemoteGrads, RemoteKeys
from magi_attention.kernels.ffa.plans import RangePlans, RangeTensors
from magi_attention.kernels.tables import SliceTables
from magi_attention.kernels.types import AttnOptions, Grads, Partial, Problem
from magi_attention.native.ffa import FfaLibrary


class FfaBackend:
    """Forward and backward by the CUDA kernels of ``library``, by default the one built ahead.

    Kernels that it lacks are compiled at first use, where that is possible (``FfaLibraries``).
    ``host_planning`` plans masks given as tensors on the host, which waits for the device but checks every range;
    by default the device plans and the ranges are trusted, unless the bound of the plan is above
    ``DEVICE_PLAN_BYTES``. What an instance keeps are memos: prepared calls,
    plans, and one small workspace of the forward per stream.
    """

    name = "ffa"

    def __init__(
        self, library: FfaLibrary | None = None, runtime: CudaRuntime | None = None, host_planning: bool = False
    ) -> None:
        self._libraries = FfaLibraries.find() if library is None else FfaLibraries(library)
        self._runtime = runtime
        tables = SliceTables()  # of masks that come as range tensors
        self._range_plans = RangePlans(self._libraries, host_planning, tables)
        self._forward = ForwardCalls(self._libraries, self._range_plans)
        self._backward = BackwardCalls(self._libraries, self._range_plans)
        self._host_ranges = HostRanges(tables)

    @property
    def library(self) -> FfaLibrary:
        """Any library at hand, for what does not depend on the kernels in it: tiles and planners."""
        return self._libraries.at_hand

    @property
    def runtime(self) -> CudaRuntime:
        if self._runtime is None:
            self._runtime = CudaRuntime()
        return self._runtime

    @property
    def has_runtime(self) -> bool:
        """Could a call be launched at all?"""
        return self._runtime is not None or CudaRuntime.exists()

    def why_not(self, problem: Problem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda":
            return f"The CUDA kernels run on NVIDIA GPUs, not on {p.device_type} tensors."
        if p.capability != (9, 0):
            return f"The kernels are built for compute capability 9.0 (H100, H200), not for {p.capability}."
        if p.dtype not in DTYPES:
            return f"The CUDA kernels compute bfloat16 and float16, not {p.dtype}."
        for dim in (p.head_dim, p.head_dim_v):
            if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
                return f"Head dim {dim} is no multiple of 8 from 8 to {MAX_HEAD_DIM}."
        if p.num_heads_kv == 0 or p.num_heads_q == 0 or p.num_heads_q % p.num_heads_kv:
            return f"{p.num_heads_q} query heads are no multiple of {p.num_heads_kv} kv heads."
        if not p.options.softmax_scale > 0:
            return f"softmax_scale is {p.options.softmax_scale}; the CUDA kernels need a positive one."
        kinds = ("fwd", "bwd") if p.needs_backward else ("fwd",)
        return self._libraries.why_not(kinds, p.dtype, p.head_dim, p.head_dim_v)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        init: Partial | None = None,
    ) -> Partial:
        """See ``Backend.forward``: out and lse in float32, merged into ``init`` inside the kernel."""
        if init is None:
            return Partial(*self._forward.run(self.runtime, q, k, v, slices, options, sink, None, torch.float32))
        _check_init(init, q, v)
        # The kernel writes dense rows: buffers of other layouts go through a copy.
        work = Partial(init.out.contiguous(), init.lse.contiguous(), init.max_logits)
        if options.return_max_logits and work.max_logits is None:
            work.max_logits = init.max_logits = minus_inf(q)
        self._forward.run(self.runtime, q, k, v, slices, options, sink, work, torch.float32)
        for mine, theirs in ((work.out, init.out), (work.lse, init.lse)):
            if mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                theirs.copy_(mine)
        return init

    def forward_final(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: SliceTable | RangeTensors,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
    ) -> Final:
        """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq) float32, max_logits (Hq,) float32 or None)``.

        For results that nothing is merged into: out is rounded once, inside the kernel.
        """
        return self._forward.run(self.runtime, q, k, v, slices, options, sink, None, None)

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
    ) -> Grads:
        """See ``Backend.backward``: gradients in float32, added to those of ``init`` inside the kernel.

        ``dout`` is rounded to q's dtype. An ``out`` that q's dtype cannot hold, as ``forward`` gives it, counts whole.
        """
        x = Operands(dout, q, k, v, out if delta is None else None, lse, delta)
        return self._backward.run(self.runtime, x, slices, options, sink, init, torch.float32, keeps_delta=init is None)

    def backward_final(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        slices: SliceTable | RangeTensors,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
    ) -> Grads:
        """Gradients of ``forward_final``: dq, dk, dv in q's dtype, rounded once in the kernel; dsink float32."""
        return self._backward.run(
            self.runtime, Operands(dout, q, k, v, out, lse, None), slices, options, sink, None, q.dtype
        )

    def slices_of(
        self, mask: SliceTable | RangeTensors, q: torch.Tensor, k: torch.Tensor, options: AttnOptions
    ) -> SliceTable | None:
        """The slices of a mask given as range tensors, if the host knows them by now, for a faster backward.

        The first call of a mask starts to read its ranges. None with ``deterministic``, because whether the host knows
        them is a matter of time, and the two backwards add in different orders.
        """
        if isinstance(mask, SliceTable):
            return mask
        if options.deterministic:
            return None
        runtime, index = self.runtime, q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.slices_of(mask, q, k, options)
        return self._host_ranges.find(runtime, mask, q.shape[0], k.shape[0])

    def forward_fused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        remote: RemoteKeys,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        event: int = 0,
    ) -> Final:
        """``forward_final`` over k, v and the keys that other ranks are putting, with this rank's put. ``event`` is
        that of CUDA to be recorded behind it, 0 for none."""
        return self._forward.run_fused(self.runtime, q, k, v, remote, options, sink, event)

    def backward_fused(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        remote: RemoteKeys,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
    ) -> RemoteGrads:
        """Gradients of ``forward_fused``; those of remote keys go to their owners."""
        return self._backward.run_fused(self.runtime, Operands(dout, q, k, v, out, lse, None), remote, options, sink)

    def prepared(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: RangeTensors,
        options: AttnOptions,
        sink: torch.Tensor | None,
    ) -> PreparedCall | None:
        """The launch of a ``forward_final`` that ran before with these arguments; None if it is not to be repeated.

        ``options`` is the object given then.
        """
        if self._runtime is None:  # nothing has run
            return None
        return self._forward.prepared(self._runtime, q, k, v, mask, options, sink)


def _check_init(init: Partial, q: torch.Tensor, v: torch.Tensor) -> None:
    check_buffer("out", init.out, (*q.shape[:2], v.shape[2]))
    check_buffer("lse", init.lse, tuple(q.shape[:2]))
