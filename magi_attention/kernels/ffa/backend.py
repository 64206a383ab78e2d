# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as a backend, ``"ffa"``: flexible flash attention on NVIDIA GPUs.

Each GPU family has a library of its own (``native.families``); the GPU of the operands decides which one runs.

Strides are honoured if the copy engine can: last dim 1, others multiples of 8 elements, base address a multiple
of 16 bytes. Other inputs are copied first; one log line says so.
"""

from __future__ import annotations

import torch

from magi_attention.common.slices import SliceTable
from magi_attention.env import build as env
from magi_attention.kernels.ffa.ahead import KernelTiles
from magi_attention.kernels.ffa.backward import BackwardCalls
from magi_attention.kernels.ffa.forward import ForwardCalls
from magi_attention.kernels.ffa.gpus import Gpus
from magi_attention.kernels.ffa.host_ranges import HostRanges
from magi_attention.kernels.ffa.operands import DTYPES, MAX_HEAD_DIM, CudaRuntime, check_buffer, minus_inf
from magi_attention.kernels.tables import SliceTables
from magi_attention.kernels.types import (
    AttnOptions,
    BackwardOperands,
    Grads,
    Operands,
    Partial,
    Problem,
    RangeTensors,
)
from magi_attention.native.families import SM90, describe_capabilities
from magi_attention.native.ffa import FfaLibrary


class FfaBackend:
    """Forward and backward by the CUDA kernels of ``library``, by default by those of the operands' GPU family.

    Kernels that are not built ahead are compiled at first use, where that is possible (``FfaLibraries``). With
    ``portable``, by default as MAGI_ATTENTION_PORTABLE_KERNELS says, 9.0 GPUs run the portable kernels, too.
    ``host_planning`` plans masks given as tensors on the host, which waits for the device but checks every range;
    by default the device plans and the ranges are trusted, unless the bound of the plan is above
    ``DEVICE_PLAN_BYTES``. What an instance keeps are memos: prepared calls,
    plans, and one small workspace of the forward per stream.

    ``forward_final`` (``ForwardCalls.run``) gives out in q's dtype, rounded once inside the kernel, and lse and
    max_logits in float32. ``backward_final`` (``BackwardCalls.run``) gives dq, dk, dv in q's dtype and dsink in
    float32. ``forward_fused`` and ``backward_fused`` are those over keys that other ranks are putting, too, ready to be
    launched (``FusedLaunch``). ``prepared`` is the launch of a ``forward_final`` that ran before.
    """

    name = "ffa"

    def __init__(
        self, library: FfaLibrary | None = None, runtime: CudaRuntime | None = None, host_planning: bool = False,
        portable: bool | None = None,
    ) -> None:  # fmt: skip
        portable = env.is_portable_kernels() if portable is None else portable
        tables = SliceTables()  # of masks that come as range tensors
        self._host_ranges = HostRanges(tables)
        self._gpus = Gpus(library, runtime, host_planning, portable, tables)
        self._forward, self._backward = ForwardCalls(self._gpus), BackwardCalls(self._gpus)
        # Bound, because each call that only passed its operands on would cost every layer its time.
        self.forward_final, self.forward_fused = self._forward.run, self._forward.run_fused
        self.backward_final, self.backward_fused = self._backward.run, self._backward.run_fused
        self.prepared = self._forward.prepared

    @property
    def library(self) -> FfaLibrary:
        """The library given, else that of 9.0 GPUs, for what does not depend on the kernels in it, such as planners."""
        family = self._gpus.family(SM90.capabilities[0]) or SM90
        return self._gpus.of_family(family).libraries.at_hand

    @property
    def runtime(self) -> CudaRuntime:
        return self._gpus.runtime

    @property
    def has_runtime(self) -> bool:
        """Could a call be launched at all?"""
        return self._gpus.has_runtime

    def tiles(
        self, index: int, dtype: torch.dtype, heads: tuple[int, int], head_dims: tuple[int, int], options: AttnOptions
    ) -> KernelTiles:
        """What the tile plans of calls on GPU ``index`` depend on; ``heads`` (query, kv), ``head_dims`` (q and k, v).

        May compile the kernels, as the first call would.
        """
        libraries = self._gpus.of(index).libraries
        forward = libraries.get("fwd", dtype, *head_dims).tiles(DTYPES[dtype], *heads, *head_dims)
        backward = libraries.get("bwd", dtype, *head_dims).backward_tile(*head_dims)
        num_sms, is_portable = self.runtime.num_sms(index), libraries.family.is_portable
        return KernelTiles(forward, backward, heads, head_dims, num_sms, options, is_portable)

    def why_not(self, problem: Problem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda":
            return f"The CUDA kernels run on NVIDIA GPUs, not on {p.device_type} tensors."
        family = SM90 if self._gpus.given is not None else self._gpus.family(p.capability)
        if family is None or p.capability not in family.capabilities:
            return f"The kernels are built for compute capabilities {describe_capabilities()}, not for {p.capability}."
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
        return self._gpus.of_family(family).libraries.why_not(kinds, p.dtype, p.head_dim, p.head_dim_v)

    def forward(self, x: Operands, init: Partial | None = None) -> Partial:
        """See ``Backend.forward``: out and lse in float32, merged into ``init`` inside the kernel."""
        if init is None:
            return Partial(*self._forward.run(x, None, torch.float32))
        _check_init(init, x)
        # The kernel writes dense rows: buffers of other layouts go through a copy.
        work = Partial(init.out.contiguous(), init.lse.contiguous(), init.max_logits)
        if x.options.return_max_logits and work.max_logits is None:
            work.max_logits = init.max_logits = minus_inf(x.q)
        self._forward.run(x, work, torch.float32)
        for mine, theirs in ((work.out, init.out), (work.lse, init.lse)):
            if mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                theirs.copy_(mine)
        return init

    def backward(self, x: BackwardOperands, init: Grads | None = None) -> Grads:
        """See ``Backend.backward``: gradients in float32, added to those of ``init`` inside the kernel.

        ``dout`` is rounded to q's dtype. An ``out`` that q's dtype cannot hold, as ``forward`` gives it, counts whole.
        """
        return self._backward.run(x, init, torch.float32, keeps_delta=init is None)

    def slices_of(
        self, mask: SliceTable | RangeTensors, q: torch.Tensor, k: torch.Tensor, options: AttnOptions
    ) -> SliceTable | None:
        """The slices of a mask given as range tensors, if the host knows them by now, for a faster backward.

        The first call of a mask starts to read its ranges. None with ``deterministic``, because whether the host knows
        them is a matter of time, and the two backwards add in different orders; and for portable kernels, which make
        the same of both.
        """
        if isinstance(mask, SliceTable):
            return mask
        index = q.get_device()
        if options.deterministic or self._gpus.of(index).is_portable:
            return None
        runtime = self._gpus.runtime
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.slices_of(mask, q, k, options)
        return self._host_ranges.find(runtime, mask, q.shape[0], k.shape[0])


def _check_init(init: Partial, x: Operands) -> None:
    rows, heads, _ = x.q.shape
    check_buffer("out", init.out, (rows, heads, x.v.shape[2]))
    check_buffer("lse", init.lse, (rows, heads))
