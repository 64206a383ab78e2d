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
from magi_attention.kernels.ffa.gpus import Gpus
from magi_attention.kernels.ffa.launch_cache import PreparedCall
from magi_attention.kernels.ffa.operands import (
    DTYPES,
    check_shapes,
    dense,
    log_copy,
    minus_inf,
    odd_strides,
    remember,
    stride_fields,
)
from magi_attention.kernels.ffa.peer_kv import NO_TOKENS, FusedLaunch, RemoteKeys
from magi_attention.kernels.ffa.plans import Kept, PlanShape, RangePlans
from magi_attention.kernels.types import AttnOptions, Final, Operands, Partial, check_dropout
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.planner.schedule import ForwardSplits

_pack_addresses = abi.FFA_FWD_POINTERS.pack
_empty_like = torch.empty_like
_WHAT = "Attention forward"


@dataclass(frozen=True)
class _Prepared:
    """What calls of equal shapes, strides and options share."""

    library: FfaLibrary
    plans: RangePlans
    prefix: bytes
    workspace_bytes: int
    plan: PlanShape
    out_like: torch.Tensor  # one element, expanded: empty_like parses its arguments in half the time of empty
    lse_like: torch.Tensor
    device: torch.device
    is_empty: bool  # there are no rows
    is_unusual: bool  # it is empty, or the copy engine cannot follow the strides
    options: AttnOptions  # held, so that its id, which is part of the key, stays taken


class ForwardCalls:
    """Runs forwards; what it keeps are prepared parameter blocks, and one small workspace per stream."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._prepared: dict[tuple[object, ...], _Prepared] = {}
        self._workspaces: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = {}  # with address and bytes

    def run(self, x: Operands, into: Partial | None = None, out_dtype: torch.dtype | None = None) -> Final:
        """out, lse and max_logits, or ``into`` with the result joined to it; ``out_dtype`` None is q's."""
        q, k, v, mask, options, sink, dropout = x
        index, runtime = q.get_device(), self._gpus.runtime
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run(x, into, out_dtype)
        if dropout is not None or options.dropout_p:
            check_dropout(x)
        key = _key(x, index, into, out_dtype, k.shape[0], None)
        call = self._prepared.get(key) or self._prepare(key, x, into, out_dtype, k.shape[0], None)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if call.is_unusual or (addresses[0] | addresses[1] | addresses[2]) & 15:
            if call.is_empty:
                return self._run_empty(x, into, out_dtype, call)
            return self.run(x._replace(q=dense(q), k=dense(k), v=dense(v)), into, out_dtype)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        plan = call.plans.plan(mask, call.plan, call.device, stream, capturing)  # held until the launch
        if plan.splits is not None:
            key = _key(x, index, into, out_dtype, k.shape[0], plan.splits)
            call = self._prepared.get(key) or self._prepare(key, x, into, out_dtype, k.shape[0], plan.splits)
        params, final, _held = self._filled(call, x, into, plan, addresses, index, stream, capturing)
        status = call.library.forward_raw(params)
        if status:
            call.library.check(status, _WHAT)
        return final

    def run_fused(self, x: Operands, remote: RemoteKeys, event: int = 0) -> FusedLaunch[Final]:
        """out, lse and max_logits over k, v and the keys that other ranks are putting; the mask is that of ``remote``.
        ``event`` is that of CUDA to be recorded behind the kernel, 0 for none."""
        q, k, v, _, options, sink, dropout = x
        index, runtime = q.get_device(), self._gpus.runtime
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.run_fused(x, remote, event).inside(runtime.on_device(index))
        if dropout is not None or options.dropout_p:
            check_dropout(x)
        # k and v are known by ``remote``.
        key = q.shape, q.stride(), q.dtype, id(options), None if sink is None else (sink.shape, sink.get_device())
        call, plan = remote.known.get(key) or self._keep(key, x, index, remote)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if call.is_unusual or (addresses[0] | addresses[1] | addresses[2]) & 15:
            return self.run_fused(x._replace(q=dense(q), k=dense(k), v=dense(v)), remote, event)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        params, final, held = self._filled(call, x, None, plan, addresses, index, stream, capturing)
        args, held = (params, remote.forward_params, remote.put, event), (x, plan, held)
        return FusedLaunch(call.library, call.library.forward_remote_raw, args, _WHAT, final, held)

    def _filled(
        self, call: _Prepared, x: Operands, into: Partial | None, plan: Kept, addresses: tuple[int, int, int],
        index: int, stream: int, capturing: bool,
    ) -> tuple[bytes, Final, object]:  # fmt: skip
        """The parameters of a launch, what it will have written, and what is to be held until then."""
        options, sink = x.options, x.sink
        if into is None:
            out, lse = _empty_like(call.out_like), _empty_like(call.lse_like)
            max_logits = minus_inf(call.out_like) if options.return_max_logits else None
        else:
            out, lse, max_logits = into.out, into.lse, into.max_logits
        if sink is not None:
            sink = sink.detach().to(torch.float32).contiguous()
        work = None if capturing else self._workspaces.get((index, stream))
        if work is None or work[2] < call.workspace_bytes:
            work = self._make_workspace(call, index, stream, capturing)
        params = call.prefix + _pack_addresses(
            *addresses, out.data_ptr(), lse.data_ptr(), 0 if max_logits is None else max_logits.data_ptr(),
            0 if sink is None or not sink.numel() else sink.data_ptr(), plan.address, work[1], stream,
            0 if x.dropout is None else x.dropout.address,
        )  # fmt: skip
        return params, (out, lse, max_logits), (sink, work)

    def prepared(self, x: Operands) -> PreparedCall | None:
        """The launch of a call of ``run`` that ran before with the same operands, whose mask is tensors; None if it is
        not to be repeated. The options are the object given then."""
        index, mask = x.q.get_device(), x.mask
        call = self._prepared.get(_key(x, index, None, None, x.k.shape[0], None))
        if call is None or call.is_unusual or isinstance(mask, SliceTable):
            return None
        runtime = self._gpus.runtime
        if index != runtime.current_device() or runtime.is_capturing():
            return None
        stream = runtime.stream(index)
        plan = call.plans.find(mask, call.plan, stream)
        work, work_at, work_bytes = self._workspaces.get((index, stream), (None, 0, 0))
        if plan is None or work is None or work_bytes < call.workspace_bytes:
            return None
        library = call.library
        return PreparedCall(
            call.prefix, library.forward_address, library.check, runtime, index, stream, call.out_like, call.lse_like,
            partial(minus_inf, call.out_like) if x.options.return_max_logits else None, plan, plan.data_ptr(), work,
            work_at,
        )  # fmt: skip

    def _keep(self, known: tuple[object, ...], x: Operands, index: int, remote: RemoteKeys) -> tuple[_Prepared, Kept]:
        """What calls beside ``remote`` with these operands share, and their plan; remembered there under ``known``."""
        if not x.q.shape[0]:
            raise ContractError(NO_TOKENS)
        total_k, runtime = remote.mask.total_k, self._gpus.runtime
        key = _key(x, index, None, None, total_k, None)
        call = self._prepared.get(key) or self._prepare(key, x, None, None, total_k, None)
        plan = call.plans.plan(remote, call.plan, call.device, runtime.stream(index), runtime.is_capturing())
        remember(remote.known, known, (call, plan))
        return call, plan

    def _make_workspace(
        self, call: _Prepared, index: int, stream: int, capturing: bool
    ) -> tuple[torch.Tensor, int, int]:
        tensor = torch.zeros(call.workspace_bytes, dtype=torch.uint8, device=call.device)
        work = (tensor, tensor.data_ptr(), call.workspace_bytes)
        if not capturing:  # a graph may be replayed beside other work, so a captured call gets its own
            self._workspaces[index, stream] = work
        return work

    def _prepare(
        self, key: tuple[object, ...], x: Operands, into: Partial | None, out_dtype: torch.dtype | None, total_k: int,
        splits: ForwardSplits | None,
    ) -> _Prepared:  # fmt: skip
        """Checks shapes and dtypes, then fills the parameter block; remembered under ``key``."""
        q, k, v, options, sink = x.q, x.k, x.v, x.options, x.sink
        check_shapes(q, k, v)
        tokens, heads, dim = q.shape
        kernels = self._gpus.of(q.get_device())
        library = kernels.libraries.get("fwd", q.dtype, dim, v.shape[2])
        tiles = library.tiles(DTYPES[q.dtype], heads, k.shape[1], dim, v.shape[2])
        tile = tiles.of(tokens, heads, self._gpus.runtime.num_sms(q.get_device()), _is_even(x))
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
            library, kernels.plans, prefix, workspace_bytes,
            PlanShape(tokens, total_k, tile, head_units=heads // tile.pack), out_like.expand(out_shape),
            lse_like.expand(lse_shape), q.device, is_empty, is_empty or bool(odd), options,
        )  # fmt: skip
        remember(self._prepared, key, prepared)
        return prepared

    def _run_empty(self, x: Operands, into: Partial | None, out_dtype: torch.dtype | None, call: _Prepared) -> Final:
        """No query rows: nothing to do. No key rows: one key that nobody sees, so that a sink still counts."""
        if 0 not in call.out_like.shape:
            k, v = (x.q.new_zeros((1, *like.shape[1:])) for like in (x.k, x.v))
            options = replace(x.options, dropout_p=0.0)
            return self.run(Operands(x.q, k, v, SliceTable(_NO_SLICES), options, x.sink), into, out_dtype)
        if into is not None:
            return into.out, into.lse, into.max_logits
        out, lse = torch.empty_like(call.out_like), torch.empty_like(call.lse_like)
        return out, lse, minus_inf(x.q) if x.options.return_max_logits else None


def _key(
    x: Operands, index: int, into: Partial | None, out_dtype: torch.dtype | None, total_k: int,
    splits: ForwardSplits | None,
) -> tuple[object, ...]:  # fmt: skip
    """``index``: the GPU of q."""
    q, k, v, _, options, sink, _ = x
    return (
        _is_even(x), q.shape, q.stride(), q.dtype, index, k.shape, k.stride(), k.dtype, k.get_device(), v.shape,
        v.stride(), v.dtype, v.get_device(), id(options),
        None if sink is None else (sink.shape, sink.get_device()), into is None, out_dtype, total_k, splits,
    )  # fmt: skip


def _is_even(x: Operands) -> bool:
    """Is it known that all queries see the same keys?"""
    return isinstance(x.mask, SliceTable) and x.mask.even_rows >= x.q.shape[0]


_NO_SLICES = SliceTable(np.zeros((0, 5), dtype=np.int64)).array
