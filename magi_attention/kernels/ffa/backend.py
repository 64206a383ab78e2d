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
from magi_attention.errors import UnsupportedError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.ffa.ahead import KernelTiles
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
from magi_attention.native.families import SM90, Family, describe_capabilities, family_of
from magi_attention.native.ffa import FfaLibrary


class FamilyCalls:
    """Forward and backward of one GPU family, with what they keep."""

    def __init__(self, libraries: FfaLibraries, host_planning: bool, tables: SliceTables) -> None:
        self.libraries = libraries
        self.plans = RangePlans(libraries, host_planning, tables)
        self.forward = ForwardCalls(libraries, self.plans)
        self.backward = BackwardCalls(libraries, self.plans)


class FfaBackend:
    """Forward and backward by the CUDA kernels of ``library``, by default by those of the operands' GPU family.

    Kernels that are not built ahead are compiled at first use, where that is possible (``FfaLibraries``). With
    ``portable``, by default as MAGI_ATTENTION_PORTABLE_KERNELS says, 9.0 GPUs run the portable kernels, too.
    ``host_planning`` plans masks given as tensors on the host, which waits for the device but checks every range;
    by default the device plans and the ranges are trusted, unless the bound of the plan is above
    ``DEVICE_PLAN_BYTES``. What an instance keeps are memos: prepared calls,
    plans, and one small workspace of the forward per stream.
    """

    name = "ffa"

    def __init__(
        self, library: FfaLibrary | None = None, runtime: CudaRuntime | None = None, host_planning: bool = False,
        portable: bool | None = None,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._host_planning = host_planning
        self._portable = env.is_portable_kernels() if portable is None else portable
        self._tables = SliceTables()  # of masks that come as range tensors
        self._host_ranges = HostRanges(self._tables)
        self._given = None if library is None else FamilyCalls(FfaLibraries(library), host_planning, self._tables)
        self._of_family: dict[Family, FamilyCalls] = {}
        self._of_device: dict[int, FamilyCalls] = {}

    @property
    def library(self) -> FfaLibrary:
        """The library given, else that of 9.0 GPUs, for what does not depend on the kernels in it, such as planners."""
        family = family_of(SM90.capabilities[0], self._portable) or SM90
        return (self._given or self._family_calls(family)).libraries.at_hand

    @property
    def runtime(self) -> CudaRuntime:
        if self._runtime is None:
            self._runtime = CudaRuntime()
        return self._runtime

    @property
    def has_runtime(self) -> bool:
        """Could a call be launched at all?"""
        return self._runtime is not None or CudaRuntime.exists()

    def calls_of(self, q: torch.Tensor) -> FamilyCalls:
        """Those for the device of ``q``."""
        index = q.get_device()
        return self._of_device.get(index) or self._find(index)

    def tiles(
        self, index: int, dtype: torch.dtype, heads: tuple[int, int], head_dims: tuple[int, int], options: AttnOptions
    ) -> KernelTiles:
        """What the tile plans of calls on GPU ``index`` depend on; ``heads`` (query, kv), ``head_dims`` (q and k, v).

        May compile the kernels, as the first call would.
        """
        libraries = (self._of_device.get(index) or self._find(index)).libraries
        forward = libraries.get("fwd", dtype, *head_dims).tile(DTYPES[dtype], *heads, *head_dims)
        backward = libraries.get("bwd", dtype, *head_dims).backward_tile(*head_dims)
        num_sms, is_portable = self.runtime.num_sms(index), libraries.family.is_portable
        return KernelTiles(forward, backward, heads, head_dims, num_sms, options, is_portable)

    def _find(self, index: int) -> FamilyCalls:
        found = self._given
        if found is None:
            family = family_of(self.runtime.capability(index), self._portable)
            if family is None:
                raise UnsupportedError(f"There are no kernels for GPU {index}; ask why_not before a call.")
            found = self._family_calls(family)
        self._of_device[index] = found
        return found

    def _family_calls(self, family: Family) -> FamilyCalls:
        found = self._of_family.get(family)
        if found is None:
            found = FamilyCalls(FfaLibraries.find(family), self._host_planning, self._tables)
            self._of_family[family] = found
        return found

    def why_not(self, problem: Problem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda":
            return f"The CUDA kernels run on NVIDIA GPUs, not on {p.device_type} tensors."
        family = SM90 if self._given is not None else family_of(p.capability, self._portable)
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
        libraries = (self._given or self._family_calls(family)).libraries
        return libraries.why_not(kinds, p.dtype, p.head_dim, p.head_dim_v)

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
        """See ``Backend.forward``: out and lse in float32, merged into ``init`` inside the kernel."""
        if init is None:
            calls = self.calls_of(q)
            got = calls.forward.run(self.runtime, q, k, v, slices, options, sink, None, torch.float32, dropout)
            return Partial(*got)
        _check_init(init, q, v)
        # The kernel writes dense rows: buffers of other layouts go through a copy.
        work = Partial(init.out.contiguous(), init.lse.contiguous(), init.max_logits)
        if options.return_max_logits and work.max_logits is None:
            work.max_logits = init.max_logits = minus_inf(q)
        self.calls_of(q).forward.run(self.runtime, q, k, v, slices, options, sink, work, torch.float32, dropout)
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
        dropout: DropoutMask | None = None,
    ) -> Final:
        """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq) float32, max_logits (Hq,) float32 or None)``.

        For results that nothing is merged into: out is rounded once, inside the kernel.
        """
        return self.calls_of(q).forward.run(self.runtime, q, k, v, slices, options, sink, None, None, dropout)

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
        """See ``Backend.backward``: gradients in float32, added to those of ``init`` inside the kernel.

        ``dout`` is rounded to q's dtype. An ``out`` that q's dtype cannot hold, as ``forward`` gives it, counts whole.
        """
        x = Operands(dout, q, k, v, out if delta is None else None, lse, delta)
        calls, is_first = self.calls_of(q), init is None
        run = calls.backward.run
        return run(self.runtime, x, slices, options, sink, init, torch.float32, keeps_delta=is_first, dropout=dropout)

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
        dropout: DropoutMask | None = None,
        delta: torch.Tensor | None = None,
    ) -> Grads:
        """Gradients of ``forward_final``: dq, dk, dv in q's dtype, rounded once in the kernel; dsink float32."""
        x = Operands(dout, q, k, v, out if delta is None else None, lse, delta)
        return self.calls_of(q).backward.run(self.runtime, x, slices, options, sink, None, q.dtype, dropout=dropout)

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
        if options.deterministic or self.calls_of(q).libraries.family.is_portable:
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
        return self.calls_of(q).forward.run_fused(self.runtime, q, k, v, remote, options, sink, event)

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
        delta: torch.Tensor | None = None,
    ) -> RemoteGrads:
        """Gradients of ``forward_fused``; those of remote keys go to their owners. With ``delta`` nobody reads out."""
        x = Operands(dout, q, k, v, out if delta is None else None, lse, delta)
        return self.calls_of(q).backward.run_fused(self.runtime, x, remote, options, sink)

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
        return self.calls_of(q).forward.prepared(self._runtime, q, k, v, mask, options, sink)


def _check_init(init: Partial, q: torch.Tensor, v: torch.Tensor) -> None:
    check_buffer("out", init.out, (*q.shape[:2], v.shape[2]))
    check_buffer("lse", init.lse, tuple(q.shape[:2]))
