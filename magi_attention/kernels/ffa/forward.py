# SPDX-License-Identifier: Apache-2.0
"""Forward launches of the CUDA kernels: out and lse of a mask, or of keys that other ranks are putting meanwhile.

Everything that depends only on shapes is prepared once, because a short kernel runs no longer than the host unpacks to
launch it: a parameter block without its addresses. Each later call looks it up, allocates ``out`` and ``lse``, appends
ten addresses and makes one C call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.ffa.launch_cache import PreparedCall
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.ffa.operands import (
    DTYPES,
    CudaRuntime,
    check_shapes,
    dense,
    log_copy,
    minus_inf,
    odd_strides,
    remember,
    stride_fields,
)
from magi_attention.kernels.ffa.peer_kv import NO_TOKENS, RemoteKeys, StartPut
from magi_attention.kernels.ffa.plans import PlanShape, RangePlans, RangeTensors
from magi_attention.kernels.types import AttnOptions, Partial, check_dropout
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.schedule import ForwardSplits

_pack_addresses = abi.FFA_FWD_POINTERS.pack
_empty_like = torch.empty_like
Final = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class _Prepared:
    """What calls of equal shapes, strides and options share."""

    library: FfaLibrary
    prefix: bytes
    workspace_bytes: int
    plan: PlanShape
    out_like: torch.Tensor  # one element, expanded: empty_like parses its arguments in half the time of empty
    lse_like: torch.Tensor
    device: torch.device
    is_unusual: bool  # there are no rows, or the copy engine cannot follow the strides
    options: AttnOptions  # held, so that its id, which is part of the key, stays taken


# What launches this rank's put, and magi_ffa_remote, a put that goes with the launch, and the event behind it.
_Beside = tuple[StartPut | None, tuple[bytes, bytes | None, int]]


class ForwardCalls:
    """Runs forwards; what it keeps are prepared parameter blocks, and one small workspace per stream."""

    def __init__(self, libraries: FfaLibraries, plans: RangePlans) -> None:
        self._libraries = libraries
        self._plans = plans
        self._prepared: dict[tuple[object, ...], _Prepared] = {}
        self._workspaces: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = {}  # with address and bytes

    def run(
        self, runtime: CudaRuntime, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        mask: SliceTable | RangeTensors, options: AttnOptions,
        sink: torch.Tensor | None, into: Partial | None, out_dtype: torch.dtype | None,
        dropout: DropoutMask | None = None,
    ) -> Final:  # fmt: skip
        """out, lse and max_logits, or ``into`` with the result joined to it; ``out_dtype`` None is q's."""
        index = q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run(runtime, q, k, v, mask, options, sink, into, out_dtype, dropout)
        if dropout is not None or options.dropout_p:
            check_dropout(options, dropout, q, k)
        call = self._call(q, k, v, options, sink, into, out_dtype, k.shape[0])
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if call.is_unusual or (addresses[0] | addresses[1] | addresses[2]) & 15:
            if 0 in call.out_like.shape or not k.shape[0]:
                return self._run_empty(runtime, q, k, v, options, sink, into, out_dtype, call)
            q, k, v = (dense(x) for x in (q, k, v))
            return self.run(runtime, q, k, v, mask, options, sink, into, out_dtype, dropout)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        plan = self._plans.plan(mask, call.plan, call.device, stream, capturing)  # held until the launch
        if plan.splits is not None:
            call = self._call(q, k, v, options, sink, into, out_dtype, k.shape[0], plan.splits)
        return self._launch(call, addresses, sink, into, plan.address, index, stream, capturing, None, dropout)

    def run_fused(
        self,
        runtime: CudaRuntime,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        remote: RemoteKeys,
        options: AttnOptions,
        sink: torch.Tensor | None = None,
        event: int = 0,
    ) -> Final:
        """The same over k, v and the keys that other ranks are putting, with this rank's put. ``event`` is that of CUDA
        to be recorded behind it, 0 for none."""
        index = q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run_fused(runtime, q, k, v, remote, options, sink, event)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        key = _remote_key(q, options, sink)
        known = remote.known.get(key)
        if known is None:
            call = self._call(q, k, v, options, sink, None, None, remote.mask.total_k)
            if not q.shape[0]:
                raise ContractError(NO_TOKENS)
            known = (call, self._plans.plan(remote, call.plan, call.device, stream, capturing))
            remember(remote.known, key, known)
        call, plan = known  # the plan is held until the launch
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if call.is_unusual or (addresses[0] | addresses[1] | addresses[2]) & 15:
            q, k, v = (dense(x) for x in (q, k, v))
            return self.run_fused(runtime, q, k, v, remote, options, sink, event)
        beside = (remote.start_put, (remote.forward_params, remote.put, event))
        return self._launch(call, addresses, sink, None, plan.address, index, stream, capturing, beside)

    def prepared(
        self,
        runtime: CudaRuntime,
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
        call = self._prepared.get((*_key(q, k, v, options, sink, None, None), k.shape[0], None))
        if call is None or call.is_unusual:
            return None
        index = q.get_device()
        if index != runtime.current_device() or runtime.is_capturing():
            return None
        stream = runtime.stream(index)
        plan = self._plans.find(mask, call.plan, stream)
        work, work_at, work_bytes = self._workspaces.get((index, stream), (None, 0, 0))
        if plan is None or work is None or work_bytes < call.workspace_bytes:
            return None
        library = call.library
        return PreparedCall(
            call.prefix, library.forward_address, library.check, runtime, index, stream, call.out_like, call.lse_like,
            partial(minus_inf, call.out_like) if options.return_max_logits else None, plan, plan.data_ptr(), work,
            work_at,
        )  # fmt: skip

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions, sink: torch.Tensor | None,
        into: Partial | None, out_dtype: torch.dtype | None, total_k: int, splits: ForwardSplits | None = None,
    ) -> _Prepared:  # fmt: skip
        """What calls with these operands share; ``total_k`` keys, those of other ranks included."""
        key = (*_key(q, k, v, options, sink, into, out_dtype), total_k, splits)
        call = self._prepared.get(key)
        return self._prepare(key, q, k, v, options, sink, into, out_dtype, total_k, splits) if call is None else call

    def _launch(
        self, call: _Prepared, addresses: tuple[int, int, int], sink: torch.Tensor | None, into: Partial | None,
        plan_at: int, index: int, stream: int, capturing: bool, beside: _Beside | None,
        dropout: DropoutMask | None = None,
    ) -> Final:  # fmt: skip
        if into is None:
            out, lse = _empty_like(call.out_like), _empty_like(call.lse_like)
            max_logits = minus_inf(call.out_like) if call.options.return_max_logits else None
        else:
            out, lse, max_logits = into.out, into.lse, into.max_logits
        if sink is not None:
            sink = sink.detach().to(torch.float32).contiguous()  # held until the launch
        work = None if capturing else self._workspaces.get((index, stream))
        if work is None or work[2] < call.workspace_bytes:
            work = self._make_workspace(call, index, stream, capturing)
        tail = _pack_addresses(
            *addresses, out.data_ptr(), lse.data_ptr(), 0 if max_logits is None else max_logits.data_ptr(),
            0 if sink is None or not sink.numel() else sink.data_ptr(), plan_at, work[1], stream,
            0 if dropout is None else dropout.address,
        )  # fmt: skip
        library = call.library
        if beside is None:
            status = library.forward_raw(call.prefix + tail)
        else:
            start_put, args = beside
            if start_put is not None:
                start_put(stream)
            status = library.forward_remote_raw(call.prefix + tail, *args)
        if status:
            call.library.check(status, "Attention forward")
        return out, lse, max_logits

    def _make_workspace(
        self, call: _Prepared, index: int, stream: int, capturing: bool
    ) -> tuple[torch.Tensor, int, int]:
        tensor = torch.zeros(call.workspace_bytes, dtype=torch.uint8, device=call.device)
        work = (tensor, tensor.data_ptr(), call.workspace_bytes)
        if not capturing:  # a graph may be replayed beside other work, so a captured call gets its own
            self._workspaces[index, stream] = work
        return work

    def _prepare(
        self, key: tuple[object, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions,
        sink: torch.Tensor | None, into: Partial | None, out_dtype: torch.dtype | None, total_k: int,
        splits: ForwardSplits | None,
    ) -> _Prepared:  # fmt: skip
        """Checks shapes and dtypes, then fills the parameter block; remembered under ``key``."""
        check_shapes(q, k, v)
        tokens, heads, dim = q.shape
        library = self._libraries.get("fwd", q.dtype, dim, v.shape[2])
        tile = library.tile(DTYPES[q.dtype], heads, k.shape[1], dim, v.shape[2])
        out_dtype = q.dtype if out_dtype is None else out_dtype
        out_shape, lse_shape = (tokens, heads, v.shape[2]), (tokens, heads)
        sink_count = 0 if sink is None else sink.shape[0 if options.sink_layout == "sh" else 1]
        cut = splits or ForwardSplits(0, 0, 0)
        prefix, workspace_bytes = library.prefix(
            split_tiles=cut.tiles, split_parts=cut.parts, split_blocks=cut.blocks,
            dtype=DTYPES[q.dtype], out_dtype=abi.FP32 if out_dtype == torch.float32 else DTYPES[out_dtype],
            total_q=tokens, total_k=total_k, heads_q=heads, heads_kv=k.shape[1], head_dim=dim,
            head_dim_v=v.shape[2], pack=tile.pack, tile_tokens=tile.tokens, accumulate=int(into is not None),
            sm_margin=options.sm_margin, sink_count=sink_count, sink_per_row=int(options.sink_layout == "ssh"),
            softmax_scale=options.softmax_scale, softcap=options.softcap, has_dropout=int(options.dropout_p > 0),
            **stride_fields(q=q, k=k, v=v),
            out_stride_token=heads * v.shape[2], out_stride_head=v.shape[2],
        )  # fmt: skip
        is_empty = 0 in out_shape or total_k == 0
        odd = "" if is_empty else odd_strides(q=q, k=k, v=v)
        if odd:
            log_copy(odd)
        out_like, lse_like = q.new_empty((), dtype=out_dtype), q.new_empty((), dtype=torch.float32)
        prepared = _Prepared(
            library, prefix, workspace_bytes,
            PlanShape(tokens, total_k, tile, head_units=heads // tile.pack), out_like.expand(out_shape),
            lse_like.expand(lse_shape), q.device, is_empty or bool(odd), options,
        )  # fmt: skip
        remember(self._prepared, key, prepared)
        return prepared

    def _run_empty(
        self, runtime: CudaRuntime, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions,
        sink: torch.Tensor | None,
        into: Partial | None, out_dtype: torch.dtype | None, call: _Prepared,
    ) -> Final:  # fmt: skip
        """No query rows: nothing to do. No key rows: one key that nobody sees, so that a sink still counts."""
        if 0 not in call.out_like.shape:
            k, v = (q.new_zeros((1, *x.shape[1:])) for x in (k, v))
            options = replace(options, dropout_p=0.0)
            return self.run(runtime, q, k, v, SliceTable(_NO_SLICES), options, sink, into, out_dtype)
        if into is not None:
            return into.out, into.lse, into.max_logits
        out, lse = torch.empty_like(call.out_like), torch.empty_like(call.lse_like)
        return out, lse, minus_inf(q) if options.return_max_logits else None


def _key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions, sink: torch.Tensor | None,
    into: Partial | None, out_dtype: torch.dtype | None,
) -> tuple[object, ...]:  # fmt: skip
    return (
        q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(), v.shape,
        v.stride(), v.dtype, v.get_device(), id(options),
        None if sink is None else (sink.shape, sink.get_device()), into is None, out_dtype,
    )  # fmt: skip


def _remote_key(q: torch.Tensor, options: AttnOptions, sink: torch.Tensor | None) -> tuple[object, ...]:
    """What a call depends on where k and v are known by their ``RemoteKeys``."""
    return q.shape, q.stride(), q.dtype, id(options), None if sink is None else (sink.shape, sink.get_device())


_NO_SLICES = SliceTable(np.zeros((0, 5), dtype=np.int64)).array
