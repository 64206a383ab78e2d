# SPDX-License-Identifier: Apache-2.0
"""Backward launches of the CUDA kernels: gradients from the inputs, out, lse and the gradient of out.

The plan is that of the transposed mask. dk and dv are written once, by the CTA that has the keys; dq is summed in
float32 in the workspace (``dq_accum``), in no fixed order unless ``deterministic`` is asked for. That takes as many
floats as q has values on padded heads, so the workspace is taken from torch's allocator for each call and given back,
not kept. As in the forward, what depends on shapes alone is prepared once, and layouts that the copy engine cannot
follow are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.dropout import DropoutMask
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.ffa.operands import (
    DTYPES,
    CudaRuntime,
    check_buffer,
    check_shapes,
    dense,
    log_copy,
    odd_strides,
    remember,
    stride_fields,
)
from magi_attention.kernels.ffa.peer_kv import NO_TOKENS, TILE, RemoteGrads, RemoteKeys, StartPut
from magi_attention.kernels.ffa.plans import PlanShape, RangePlans, RangeTensors
from magi_attention.kernels.ffa.schedule import UNKNOWN, RecentSchedules, select_schedule
from magi_attention.kernels.reference.correction import check_sink, sink_bwd_from_delta
from magi_attention.kernels.reference.operands import row_delta
from magi_attention.kernels.types import AttnOptions, Grads, check_dropout
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.schedule import BwdSchedule, WorkTileShape
from magi_attention.native.stream_order import StreamOrder

_pack_addresses = abi.FFA_BWD_POINTERS.pack
_pack_sums = abi.FFA_REMOTE_TAIL.pack
_empty_like = torch.empty_like


_ALIGNMENT = 128  # bytes, of what lies in a workspace
# What launches this rank's put, and magi_ffa_remote with a put that goes with the launch.
_Beside = tuple[StartPut | None, tuple[bytes, bytes | None]]


class Operands(NamedTuple):
    """dout, out (Tq, Hq, Dv), q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), lse and delta (Tq, Hq).

    Exactly one of ``out`` and ``delta``, the sum of out * dout over each row, is given.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None
    lse: torch.Tensor
    delta: torch.Tensor | None


@dataclass(frozen=True)
class _Prepared:
    """What calls of equal shapes, strides and options share. The ``like`` tensors have one element, expanded."""

    library: FfaLibrary
    prefix: bytes
    plan: PlanShape
    grads_like: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    delta_like: torch.Tensor
    workspace_like: torch.Tensor
    sums_at: tuple[int, int]  # bytes into the workspace: of dk and dv to which others add, beside keys that arrive
    order_bytes: int  # of the order that may be kept with the plan for the next call; 0: none
    device: torch.device
    is_empty: bool  # no queries or no keys
    is_unusual: bool  # the kernel cannot read the operands as they are
    options: AttnOptions  # held, so that its id, which is part of the key, stays taken


class BackwardCalls:
    """Runs backwards; what it keeps are prepared parameter blocks."""

    def __init__(self, libraries: FfaLibraries, plans: RangePlans) -> None:
        self._libraries = libraries
        self._plans = plans
        self._prepared: dict[tuple[object, ...], _Prepared] = {}
        self._recent = RecentSchedules()
        # Each deterministic kernel waits for its own CTAs and may hold the SMs that those of another wait for.
        self._deterministic: dict[int, StreamOrder] = {}  # device -> its deterministic kernels

    def run(
        self, runtime: CudaRuntime, x: Operands, mask: SliceTable | RangeTensors, options: AttnOptions,
        sink: torch.Tensor | None, into: Grads | None, grad_dtype: torch.dtype, keeps_delta: bool = False,
        dropout: DropoutMask | None = None,
    ) -> Grads:  # fmt: skip
        """Gradients in ``grad_dtype``, or added to ``into``, which is float32 then and is returned.

        With ``keeps_delta`` they carry the delta of the rows.
        """
        index = x.q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run(runtime, x, mask, options, sink, into, grad_dtype, keeps_delta, dropout)
        if dropout is not None or options.dropout_p:
            check_dropout(options, dropout, x.q, x.k)
        call = self._call(runtime, x, mask, options, into is not None, grad_dtype)
        if sink is not None:
            check_sink(sink, x.q.shape[0], x.q.shape[1], options.sink_layout)
        if into is not None:
            _check_into(into, x)
        if call.is_empty:
            return _run_empty(call, x, sink, into)
        at = _addresses(x)
        if call.is_unusual or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15:
            return self.run(runtime, _plain(x), mask, options, sink, into, grad_dtype, keeps_delta, dropout)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        plan = self._plans.plan(mask, call.plan, call.device, stream, capturing)  # held, as is the order
        kept = plan.order_of((call.prefix, stream), call.order_bytes, capturing)
        if into is None:
            grads = Grads(*map(_empty_like, call.grads_like))
        else:
            # The kernel adds to dense rows: buffers of other layouts go through a copy.
            grads = Grads(*map(_dense_buffer, (into.dq, into.dk, into.dv)))
        is_wanted = x.delta is None and (sink is not None or keeps_delta)
        delta = _empty_like(call.delta_like) if is_wanted else x.delta
        work = _empty_like(call.workspace_like)
        tail = _pack_addresses(
            *at, x.lse.data_ptr(), 0 if delta is None else delta.data_ptr(), grads.dq.data_ptr(),
            grads.dk.data_ptr(), grads.dv.data_ptr(), plan.address, work.data_ptr(),
            plan.work_list, *((0, 0) if kept is None else (kept.address, kept.is_made)), stream,
            0 if dropout is None else dropout.address,
        )  # fmt: skip
        self._launch(call, call.prefix + tail, None, runtime, index, stream, capturing)
        if kept is not None and not capturing:
            kept.is_made = True
        if sink is not None:
            grads.dsink = sink_bwd_from_delta(sink.detach(), x.lse, cast(torch.Tensor, delta), call.options.sink_layout)
        if keeps_delta:
            grads.delta = delta
        return grads if into is None else _copy_back(grads, into)

    def run_fused(
        self, runtime: CudaRuntime, x: Operands, remote: RemoteKeys, options: AttnOptions, sink: torch.Tensor | None
    ) -> RemoteGrads:
        """Gradients where keys of other ranks arrive, with this rank's put; dq is in q's dtype."""
        index = x.q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run_fused(runtime, x, remote, options, sink)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        key = _remote_key(x, options)
        known = remote.known.get(key)
        if known is None:
            call = self._call(runtime, x, remote, options, False, x.q.dtype)
            if call.is_empty:
                raise ContractError(NO_TOKENS)
            known = (call, self._plans.plan(remote, call.plan, call.device, stream, capturing))
            remember(remote.known, key, known)
        call, plan = known  # the plan is held until the launch
        if sink is not None:
            check_sink(sink, x.q.shape[0], x.q.shape[1], options.sink_layout)
        at = _addresses(x)
        if call.is_unusual or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15:
            return self.run_fused(runtime, _plain(x), remote, options, sink)
        dq, dk, dv = map(_empty_like, call.grads_like)
        work = _empty_like(call.workspace_like)
        delta = _empty_like(call.delta_like) if x.delta is None and sink is not None else x.delta
        work_at = work.data_ptr()
        sums = work_at + call.sums_at[0], work_at + call.sums_at[1]
        tail = _pack_addresses(
            *at, x.lse.data_ptr(), 0 if delta is None else delta.data_ptr(), dq.data_ptr(), dk.data_ptr(),
            dv.data_ptr(), plan.address, work_at, 0, 0, 0, stream, 0,
        )  # fmt: skip
        beside = remote.start_put, (remote.params + _pack_sums(*sums), remote.put)
        self._launch(call, call.prefix + tail, beside, runtime, index, stream, capturing)
        dsink = None
        if sink is not None:
            dsink = sink_bwd_from_delta(sink.detach(), x.lse, cast(torch.Tensor, delta), options.sink_layout)
        return RemoteGrads(dq, dk, dv, dsink, *sums, work)

    def _launch(
        self, call: _Prepared, params: bytes, beside: _Beside | None, runtime: CudaRuntime, index: int,
        stream: int, capturing: bool,
    ) -> None:  # fmt: skip
        """Deterministic kernels follow the last ones of the device."""
        if call.options.deterministic:
            stream_order = self._deterministic.get(index)
            if stream_order is None:
                made = StreamOrder(runtime.event, runtime.stream_object)
                stream_order = self._deterministic.setdefault(index, made)
            with stream_order.next(stream, capturing):
                status = _start(call.library, params, beside, stream)
        else:
            status = _start(call.library, params, beside, stream)
        if status:
            call.library.check(status, "Attention backward")

    def _call(
        self, runtime: CudaRuntime, x: Operands, mask: SliceTable | RangeTensors | RemoteKeys, options: AttnOptions,
        is_accumulating: bool, grad_dtype: torch.dtype,
    ) -> _Prepared:  # fmt: skip
        """What calls with these operands share."""
        remote = mask if isinstance(mask, RemoteKeys) else None
        num_sms = runtime.num_sms(x.q.get_device())
        if self._libraries.family.is_portable:
            schedule = UNKNOWN  # these kernels make their own
        else:
            schedule = select_schedule(x.q.shape, x.v.shape, mask, options, num_sms)
            if remote is None:
                schedule = self._recent.best(schedule, x.q.shape, x.v.shape, options)
        is_on_host = isinstance(mask, SliceTable)
        key = _key(x, options, not is_accumulating, grad_dtype, schedule, is_on_host, remote)
        call = self._prepared.get(key)
        if call is None:
            call = self._prepare(key, x, options, is_accumulating, grad_dtype, schedule, is_on_host, remote, runtime)
        return call

    def _prepare(
        self, key: tuple[object, ...], x: Operands, options: AttnOptions, is_accumulating: bool,
        grad_dtype: torch.dtype, schedule: BwdSchedule, is_on_host: bool, remote: RemoteKeys | None,
        runtime: CudaRuntime,
    ) -> _Prepared:  # fmt: skip
        """Checks shapes and dtypes, then fills the parameter block; remembered under ``key``. ``is_on_host``: the host
        knows the mask, so it can make a work list."""
        _check(x)
        q, k, v = x.q, x.k, x.v
        (tq, heads, dim), (tk, heads_kv, dim_v) = q.shape, v.shape
        if remote is not None:
            tk = remote.mask.total_k
        library = self._libraries.get("bwd", q.dtype, dim, dim_v)
        out = x.dout if x.out is None else x.out  # without one its strides are not looked at
        order = (
            abi.DQ_DETERMINISTIC
            if options.deterministic
            else abi.DQ_FIRST_WRITER
            if schedule.first_writer
            else abi.DQ_ATOMIC
        )
        stores_direct = schedule.direct_dq_store and grad_dtype != torch.float32 and not is_accumulating
        prefix, needs = library.backward_prefix(
            dtype=DTYPES[q.dtype], grad_dtype=abi.FP32 if grad_dtype == torch.float32 else DTYPES[grad_dtype],
            total_q=tq, total_k=tk, heads_q=heads, heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v,
            accumulate=int(is_accumulating), sm_margin=options.sm_margin, softmax_scale=options.softmax_scale,
            softcap=options.softcap, dq_mode=order, block_m=schedule.block_m,
            num_head_splits=schedule.num_head_splits, split_begin=schedule.split.begin, split_end=schedule.split.end,
            splits_per_split_tile=schedule.split.parts, direct_dq_store=int(stores_direct),
            has_dropout=int(options.dropout_p > 0),
            **stride_fields(q=q, k=k, v=v, out=out, dout=x.dout),
        )  # fmt: skip
        is_empty = tq == 0 or tk == 0
        odd = "" if is_empty else odd_strides(q=q, k=k, v=v, out=out, dout=x.dout)
        if odd:
            log_copy(odd)
        schedule_shape: WorkTileShape | None = None
        num_sms = runtime.num_sms(q.get_device())
        shape = heads_kv, heads // max(heads_kv, 1), num_sms, max(num_sms - options.sm_margin, 1)
        if needs.takes_list and is_on_host:
            schedule_shape = WorkTileShape(*shape, list_block_m=schedule.block_m)
        elif schedule.has_order(options.deterministic) and (is_on_host or remote is not None):
            schedule_shape = WorkTileShape(*shape, schedule.by_document, needs.tail)
        dk_at, dv_at, bytes_in_all = _with_sums(needs.workspace, remote, heads_kv, (dim, dim_v))
        grad, number = q.new_empty((), dtype=grad_dtype), q.new_empty((), dtype=torch.float32)
        tile = library.backward_tile(dim, dim_v)
        prepared = _Prepared(
            library, prefix, PlanShape(tq, tk, tile, is_transposed=True, schedule=schedule_shape),
            (grad.expand(q.shape), grad.expand(k.shape), grad.expand(v.shape)), number.expand(tq, heads),
            q.new_empty((), dtype=torch.uint8).expand(bytes_in_all), (dk_at, dv_at), needs.order, q.device, is_empty,
            bool(odd) or not _is_plain(x), options,
        )  # fmt: skip
        remember(self._prepared, key, prepared)
        return prepared


def _start(library: FfaLibrary, params: bytes, beside: _Beside | None, stream: int) -> int:
    """The launches; with keys that arrive, after this rank's own are on their way."""
    if beside is None:
        status: int = library.backward_raw(params)
    else:
        start_put, args = beside
        if start_put is not None:
            start_put(stream)
        status = library.backward_remote_raw(params, *args)
    return status


def _with_sums(
    workspace_bytes: int, remote: RemoteKeys | None, heads: int, dims: tuple[int, int]
) -> tuple[int, int, int]:
    """Where in the workspace the sums of dk and dv begin to which other ranks add, and where it ends."""
    rows = 0 if remote is None else TILE * remote.mask.num_summed * heads
    start = -(-workspace_bytes // _ALIGNMENT) * _ALIGNMENT
    return start, start + 4 * rows * dims[0], start + 4 * rows * sum(dims)


def _addresses(x: Operands) -> tuple[int, int, int, int, int]:
    """The addresses of q, k, v, out (0 for none) and dout."""
    out_at = 0 if x.out is None else x.out.data_ptr()
    return x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), out_at, x.dout.data_ptr()


def _key(
    x: Operands, options: AttnOptions, is_fresh: bool, grad_dtype: torch.dtype, schedule: BwdSchedule, is_on_host: bool,
    remote: RemoteKeys | None,
) -> tuple[object, ...]:  # fmt: skip
    return (
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in x],  # cheaper than a generator
        id(options), is_fresh, grad_dtype, schedule, is_on_host,
        None if remote is None else (remote.mask.total_k, remote.mask.num_summed),
    )  # fmt: skip


def _remote_key(x: Operands, options: AttnOptions) -> tuple[object, ...]:
    """What a call depends on where k and v are known by their ``RemoteKeys``."""
    q, dout, out, lse = x.q, x.dout, x.out, x.lse
    of_out = None if out is None else (out.shape, out.stride(), out.dtype)
    return (
        q.shape, q.stride(), q.dtype, dout.shape, dout.stride(), dout.dtype, of_out, lse.shape, lse.stride(), lse.dtype,
        id(options),
    )  # fmt: skip


def _check(x: Operands) -> None:
    check_shapes(x.q, x.k, x.v)
    rows = (*x.q.shape[:2], x.v.shape[2])
    for name, shape in (("dout", rows), ("out", rows), ("lse", rows[:2]), ("delta", rows[:2])):
        t = getattr(x, name)
        if t is not None and (tuple(t.shape) != shape or not t.is_floating_point() or t.device != x.q.device):
            raise ContractError(
                f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; with q {tuple(x.q.shape)} on {x.q.device} and "
                f"v {tuple(x.v.shape)} it must be floating point of shape {shape} on the same device."
            )


def _check_into(into: Grads, x: Operands) -> None:
    for name, like in (("q", x.q), ("k", x.k), ("v", x.v)):
        check_buffer(f"d{name}", getattr(into, f"d{name}"), like.shape)


def _is_plain(x: Operands) -> bool:
    """Whether dtypes and the layouts of lse and delta are those that the kernel reads."""
    is_same = x.dout.dtype == x.q.dtype and (x.out is None or x.out.dtype == x.q.dtype)
    return is_same and all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in (x.lse, x.delta))


def _plain(x: Operands) -> Operands:
    """``x`` as the kernel can read it: copied, converted; delta in place of an out of another dtype."""
    dout, out, delta = x.dout, x.out, x.delta
    if out is not None and out.dtype != x.q.dtype:
        delta = row_delta(out.detach(), dout.detach(), None)
        out = None
    lse = x.lse.detach().to(torch.float32).contiguous()
    delta = None if delta is None else delta.detach().to(torch.float32).contiguous()
    q, k, v = dense(x.q.detach()), dense(x.k.detach()), dense(x.v.detach())
    dout = dense(dout.detach().to(x.q.dtype))
    return Operands(dout, q, k, v, None if out is None else dense(out.detach()), lse, delta)


def _dense_buffer(buffer: torch.Tensor) -> torch.Tensor:
    is_fine = buffer.is_contiguous() and not buffer.data_ptr() & 15
    return buffer if is_fine else buffer.clone(memory_format=torch.contiguous_format)


def _copy_back(grads: Grads, into: Grads) -> Grads:
    for mine, theirs in ((grads.dq, into.dq), (grads.dk, into.dk), (grads.dv, into.dv)):
        if mine is not theirs:
            theirs.copy_(mine)
    return _add_dsink(grads.dsink, into)


def _add_dsink(dsink: torch.Tensor | None, into: Grads) -> Grads:
    if dsink is not None:
        into.dsink = dsink if into.dsink is None else into.dsink.add_(dsink)
    return into


def _run_empty(call: _Prepared, x: Operands, sink: torch.Tensor | None, into: Grads | None) -> Grads:
    """No queries or no keys: nothing sees anything, but rows with a sink still weigh it."""
    dsink = None
    if sink is not None:
        delta = row_delta(x.dout, x.dout, x.delta) if x.out is None else row_delta(x.out, x.dout, None)
        dsink = sink_bwd_from_delta(sink.detach(), x.lse.float(), delta, call.options.sink_layout)
    if into is not None:
        return _add_dsink(dsink, into)
    dq, dk, dv = (torch.zeros_like(like, memory_format=torch.contiguous_format) for like in call.grads_like)
    return Grads(dq, dk, dv, dsink)
