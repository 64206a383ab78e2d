# SPDX-License-Identifier: Apache-2.0
"""Backward launches of the CUDA kernels: gradients from the inputs, out, lse and the gradient of out.

The plan is that of the transposed mask. dk and dv are written once, by the CTA that has the keys; dq is summed in
float32 in the workspace (``dq_accum``), in no fixed order unless ``deterministic`` is asked for. That takes as many
floats as q has values on padded heads, so the workspace is taken from torch's allocator for each call and given back,
not kept. As in the forward, what depends on shapes alone is prepared once, and layouts that the copy engine cannot
follow are copied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.ffa.gpus import Gpus
from magi_attention.kernels.ffa.operands import (
    DTYPES,
    check_buffer,
    check_shapes,
    dense,
    log_copy,
    odd_strides,
    remember,
    stride_fields,
)
from magi_attention.kernels.ffa.peer_kv import NO_TOKENS, TILE, FusedLaunch, RemoteGrads, RemoteKeys
from magi_attention.kernels.ffa.plans import PlanShape, RangePlans
from magi_attention.kernels.ffa.schedule import UNKNOWN, RecentSchedules, select_schedule
from magi_attention.kernels.reference.correction import check_sink, sink_bwd_from_delta
from magi_attention.kernels.reference.operands import row_delta
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Grads, check_dropout
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.planner.schedule import BwdSchedule, WorkTileShape
from magi_attention.native.stream_order import StreamOrder

_pack_addresses = abi.FFA_BWD_POINTERS.pack
_pack_sums = abi.FFA_REMOTE_TAIL.pack
_empty_like = torch.empty_like


_WHAT = "Attention backward"
_ALIGNMENT = 128  # bytes, of what lies in a workspace


@dataclass(frozen=True)
class _Prepared:
    """What calls of equal shapes, strides and options share. The ``like`` tensors have one element, expanded."""

    library: FfaLibrary
    plans: RangePlans
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

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._prepared: dict[tuple[object, ...], _Prepared] = {}
        self._recent = RecentSchedules()
        # Each deterministic kernel waits for its own CTAs and may hold the SMs that those of another wait for.
        self._deterministic: dict[int, StreamOrder] = {}  # device -> its deterministic kernels

    def run(
        self, x: BackwardOperands, into: Grads | None = None, grad_dtype: torch.dtype | None = None,
        keeps_delta: bool = False,
    ) -> Grads:  # fmt: skip
        """Gradients in ``grad_dtype``, None for q's, or added to ``into``, which is float32 then and is returned.

        With ``keeps_delta`` they carry the delta of the rows.
        """
        index, runtime, sink, dropout = x.q.get_device(), self._gpus.runtime, x.sink, x.dropout
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run(x, into, grad_dtype, keeps_delta)
        if dropout is not None or x.options.dropout_p:
            check_dropout(x)
        call = self._call(x, None, into is not None, x.q.dtype if grad_dtype is None else grad_dtype)
        if sink is not None:
            check_sink(sink, x.q.shape[0], x.q.shape[1], x.options.sink_layout)
        if into is not None:
            _check_into(into, x)
        if call.is_empty:
            return _run_empty(call, x, into)
        at = _addresses(x)
        if call.is_unusual or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15:
            return self.run(_plain(x), into, grad_dtype, keeps_delta)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        plan = call.plans.plan(x.mask, call.plan, call.device, stream, capturing)  # held, as is the order
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
        if call.options.deterministic:
            with self._turn(index, stream, capturing):
                status = call.library.backward_raw(call.prefix + tail)
        else:
            status = call.library.backward_raw(call.prefix + tail)
        if status:
            call.library.check(status, _WHAT)
        if kept is not None and not capturing:
            kept.is_made = True
        if sink is not None:
            grads.dsink = sink_bwd_from_delta(sink.detach(), x.lse, cast(torch.Tensor, delta), call.options.sink_layout)
        if keeps_delta:
            grads.delta = delta
        return grads if into is None else _copy_back(grads, into)

    def run_fused(self, x: BackwardOperands, remote: RemoteKeys) -> FusedLaunch[RemoteGrads]:
        """Gradients where keys of other ranks arrive; dq is in q's dtype. Those of remote keys go to their owners. The
        mask is that of ``remote``."""
        index, runtime, sink = x.q.get_device(), self._gpus.runtime, x.sink
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run_fused(x, remote).inside(runtime.on_device(index))
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        key = _remote_key(x)
        known = remote.known.get(key)
        if known is None:
            call = self._call(x, remote, False, x.q.dtype)
            if call.is_empty:
                raise ContractError(NO_TOKENS)
            known = (call, call.plans.plan(remote, call.plan, call.device, stream, capturing))
            remember(remote.known, key, known)
        call, plan = known  # the plan is held until the launch
        if sink is not None:
            check_sink(sink, x.q.shape[0], x.q.shape[1], x.options.sink_layout)
        at = _addresses(x)
        if call.is_unusual or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15:
            return self.run_fused(_plain(x), remote)
        dq, dk, dv = map(_empty_like, call.grads_like)
        work = _empty_like(call.workspace_like)
        delta = _empty_like(call.delta_like) if x.delta is None and sink is not None else x.delta
        work_at = work.data_ptr()
        sums = work_at + call.sums_at[0], work_at + call.sums_at[1]
        tail = _pack_addresses(
            *at, x.lse.data_ptr(), 0 if delta is None else delta.data_ptr(), dq.data_ptr(), dk.data_ptr(),
            dv.data_ptr(), plan.address, work_at, 0, 0, 0, stream, 0,
        )  # fmt: skip
        grads = RemoteGrads(dq, dk, dv, *sums, work, self._of_sink(x, delta))
        args = call.prefix + tail, remote.params + _pack_sums(*sums), remote.put
        turn = self._turn(index, stream, capturing) if call.options.deterministic else None
        return FusedLaunch(call.library, call.library.backward_remote_raw, args, _WHAT, grads, (x, plan, delta), turn)

    @staticmethod
    def _of_sink(
        x: BackwardOperands, delta: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str] | None:
        if x.sink is None:
            return None
        return x.sink.detach(), x.lse, cast(torch.Tensor, delta), x.options.sink_layout

    def _turn(self, index: int, stream: int, capturing: bool) -> AbstractContextManager[None]:
        """What is launched inside, a deterministic kernel, follows the last ones of the device."""
        stream_order = self._deterministic.get(index)
        if stream_order is None:
            made = StreamOrder(self._gpus.runtime.event, self._gpus.runtime.stream_object)
            stream_order = self._deterministic.setdefault(index, made)
        return stream_order.next(stream, capturing)

    def _call(
        self, x: BackwardOperands, remote: RemoteKeys | None, is_accumulating: bool, grad_dtype: torch.dtype
    ) -> _Prepared:
        """What calls with these operands share."""
        dout, q, k, v, out, lse, mask, options, _, delta, _ = x
        index, row = q.get_device(), out if delta is None else delta
        if self._gpus.of(index).is_portable:
            schedule = UNKNOWN  # these kernels make their own
        else:
            masked, num_sms = mask if remote is None else remote, self._gpus.runtime.num_sms(index)
            schedule = select_schedule(q.shape, v.shape, masked, options, num_sms)
            if remote is None:
                schedule = self._recent.best(schedule, q.shape, v.shape, options)
        is_on_host = remote is None and isinstance(mask, SliceTable)
        key = (
            dout.shape, dout.stride(), dout.dtype, dout.get_device(), q.shape, q.stride(), q.dtype, index,
            k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(), v.dtype, v.get_device(),
            lse.shape, lse.stride(), lse.dtype, lse.get_device(), row.shape, row.stride(), row.dtype, row.get_device(),
            delta is None, id(options), is_accumulating, grad_dtype, schedule, is_on_host,
            None if remote is None else (remote.mask.total_k, remote.mask.num_summed),
        )  # fmt: skip
        call = self._prepared.get(key)
        if call is None:
            call = self._prepare(key, x, is_accumulating, grad_dtype, schedule, is_on_host, remote)
        return call

    def _prepare(
        self, key: tuple[object, ...], x: BackwardOperands, is_accumulating: bool, grad_dtype: torch.dtype,
        schedule: BwdSchedule, is_on_host: bool, remote: RemoteKeys | None,
    ) -> _Prepared:  # fmt: skip
        """Checks shapes and dtypes, then fills the parameter block; remembered under ``key``. ``is_on_host``: the host
        knows the mask, so it can make a work list."""
        _check(x)
        q, k, v, options = x.q, x.k, x.v, x.options
        (tq, heads, dim), (tk, heads_kv, dim_v) = q.shape, v.shape
        if remote is not None:
            tk = remote.mask.total_k
        kernels = self._gpus.of(q.get_device())
        library = kernels.libraries.get("bwd", q.dtype, dim, dim_v)
        out = _read_out(x)
        out = x.dout if out is None else out  # without one its strides are not looked at
        # With softcap or dropout only portable kernels add dq by atomics alone.
        is_first_writer = schedule.first_writer or not (options.is_plain or kernels.is_portable)
        counted = abi.DQ_DETERMINISTIC if options.deterministic else abi.DQ_FIRST_WRITER
        dq_mode = counted if options.deterministic or is_first_writer else abi.DQ_ATOMIC
        stores_direct = schedule.direct_dq_store and grad_dtype != torch.float32 and not is_accumulating
        prefix, needs = library.backward_prefix(
            dtype=DTYPES[q.dtype], grad_dtype=abi.FP32 if grad_dtype == torch.float32 else DTYPES[grad_dtype],
            total_q=tq, total_k=tk, heads_q=heads, heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v,
            accumulate=int(is_accumulating), sm_margin=options.sm_margin, softmax_scale=options.softmax_scale,
            softcap=options.softcap, dq_mode=dq_mode, block_m=schedule.block_m,
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
        num_sms = self._gpus.runtime.num_sms(q.get_device())
        shape = heads_kv, heads // max(heads_kv, 1), num_sms, max(num_sms - options.sm_margin, 1)
        if needs.takes_list and is_on_host:
            schedule_shape = WorkTileShape(*shape, list_block_m=schedule.block_m)
        elif schedule.has_order(options.deterministic) and (is_on_host or remote is not None):
            schedule_shape = WorkTileShape(*shape, schedule.by_document, needs.tail)
        dk_at, dv_at, bytes_in_all = _with_sums(needs.workspace, remote, heads_kv, (dim, dim_v))
        grad, number = q.new_empty((), dtype=grad_dtype), q.new_empty((), dtype=torch.float32)
        tile = library.backward_tile(dim, dim_v)
        prepared = _Prepared(
            library, kernels.plans, prefix, PlanShape(tq, tk, tile, is_transposed=True, schedule=schedule_shape),
            (grad.expand(q.shape), grad.expand(k.shape), grad.expand(v.shape)), number.expand(tq, heads),
            q.new_empty((), dtype=torch.uint8).expand(bytes_in_all), (dk_at, dv_at), needs.order, q.device, is_empty,
            bool(odd) or not _is_plain(x), options,
        )  # fmt: skip
        remember(self._prepared, key, prepared)
        return prepared


def _with_sums(
    workspace_bytes: int, remote: RemoteKeys | None, heads: int, dims: tuple[int, int]
) -> tuple[int, int, int]:
    """Where in the workspace the sums of dk and dv begin to which other ranks add, and where it ends."""
    rows = 0 if remote is None else TILE * remote.mask.num_summed * heads
    start = -(-workspace_bytes // _ALIGNMENT) * _ALIGNMENT
    return start, start + 4 * rows * dims[0], start + 4 * rows * sum(dims)


def _read_out(x: BackwardOperands) -> torch.Tensor | None:
    """``out``, if the kernel reads it: it works delta out of it."""
    return x.out if x.delta is None else None


def _addresses(x: BackwardOperands) -> tuple[int, int, int, int, int]:
    """The addresses of q, k, v, out (0 if it is not read) and dout."""
    out_at = x.out.data_ptr() if x.delta is None else 0
    return x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), out_at, x.dout.data_ptr()


def _remote_key(x: BackwardOperands) -> tuple[object, ...]:
    """What a call depends on where k and v are known by their ``RemoteKeys``."""
    q, dout, out, lse = x.q, x.dout, x.out, x.lse
    of_out = (out.shape, out.stride(), out.dtype) if x.delta is None else None
    return (
        q.shape, q.stride(), q.dtype, dout.shape, dout.stride(), dout.dtype, of_out, lse.shape, lse.stride(), lse.dtype,
        id(x.options),
    )  # fmt: skip


def _check(x: BackwardOperands) -> None:
    check_shapes(x.q, x.k, x.v)
    rows = (*x.q.shape[:2], x.v.shape[2])
    read = (("dout", x.dout, rows), ("out", _read_out(x), rows), ("lse", x.lse, rows[:2]), ("delta", x.delta, rows[:2]))
    for name, t, shape in read:
        if t is not None and (tuple(t.shape) != shape or not t.is_floating_point() or t.device != x.q.device):
            raise ContractError(
                f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}; with q {tuple(x.q.shape)} on {x.q.device} and "
                f"v {tuple(x.v.shape)} it must be floating point of shape {shape} on the same device."
            )


def _check_into(into: Grads, x: BackwardOperands) -> None:
    for name, like in (("q", x.q), ("k", x.k), ("v", x.v)):
        check_buffer(f"d{name}", getattr(into, f"d{name}"), like.shape)


def _is_plain(x: BackwardOperands) -> bool:
    """Whether dtypes and the layouts of lse and delta are those that the kernel reads."""
    is_same = x.dout.dtype == x.q.dtype and (x.delta is not None or x.out.dtype == x.q.dtype)
    return is_same and all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in (x.lse, x.delta))


def _plain(x: BackwardOperands) -> BackwardOperands:
    """``x`` as the kernel can read it: copied, converted; with delta where out has another dtype."""
    dout, out, delta = x.dout, x.out, x.delta
    if delta is None:
        if out.dtype == x.q.dtype:
            out = dense(out.detach())
        else:
            delta = row_delta(out.detach(), dout.detach(), None)
    lse = x.lse.detach().to(torch.float32).contiguous()
    delta = None if delta is None else delta.detach().to(torch.float32).contiguous()
    q, k, v = dense(x.q.detach()), dense(x.k.detach()), dense(x.v.detach())
    dout = dense(dout.detach().to(x.q.dtype))
    return x._replace(dout=dout, q=q, k=k, v=v, out=out, lse=lse, delta=delta)


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


def _run_empty(call: _Prepared, x: BackwardOperands, into: Grads | None) -> Grads:
    """No queries or no keys: nothing sees anything, but rows with a sink still weigh it."""
    dsink = None
    if x.sink is not None:
        delta = row_delta(x.out, x.dout, x.delta)
        dsink = sink_bwd_from_delta(x.sink.detach(), x.lse.float(), delta, x.options.sink_layout)
    if into is not None:
        return _add_dsink(dsink, into)
    dq, dk, dv = (torch.zeros_like(like, memory_format=torch.contiguous_format) for like in call.grads_like)
    return Grads(dq, dk, dv, dsink)
