# SPDX-License-Identifier: Apache-2.0
"""Index attention by the Hopper kernels of ``csrc/ffa/sm90/index``.

Forward: work tiles of queries that share a list; ``forward_choice`` says how its keys are brought. Backward: dq stays
with its list; what a list adds to dk and dv is added in memory in any order, or, with ``deterministic``, left there
entry by entry and added key by key in the order of the lists; ``backward_choice`` says where keys stay instead.

As with the dense kernels, what depends on shapes and options alone is prepared once (``launches``). Each later call
looks it up, allocates results and appends addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.env import build as env
from magi_attention.env.registry import watch
from magi_attention.kernels.ffa.operands import DTYPES, CudaRuntime, dense, remember
from magi_attention.kernels.index_attn.invert import key_counts, with_readers
from magi_attention.kernels.index_attn.launches import (
    BackwardLaunch,
    ForwardLaunch,
    prepare_backward,
    prepare_forward,
)
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.native.families import SM90
from magi_attention.native.index import abi
from magi_attention.native.index.calls import BACKWARD, IndexLibrary, load_index
from magi_attention.native.loader import why_absent

MOST_SHARES_BYTES = 1 << 31  # that one list may leave in a deterministic backward
_pack_forward, _pack_blocks = abi.FWD_TAIL.pack, abi.FWD_BLOCKS_TAIL.pack
_pack_backward, _pack_keys, _pack_sum = abi.BWD_TAIL.pack, abi.BWD_KEYS_TAIL.pack, abi.SUM_TAIL.pack
_empty_like, _zeros_like = torch.empty_like, torch.zeros_like
_Grads = tuple[torch.Tensor, Sequence[torch.Tensor]]  # dq, and dk with dv if the kernel takes a v


class IndexFfa:
    """The kernels as an ``IndexBackend``, on GPUs of compute capability 9.0.

    ``library`` and ``runtime`` are by default those of this installation. What an instance keeps are prepared calls.
    """

    name = "ffa"

    def __init__(self, library: IndexLibrary | None = None, runtime: CudaRuntime | None = None) -> None:
        self._given = library
        if runtime is not None or CudaRuntime.exists():  # else nothing can be launched
            self._runtime = runtime or CudaRuntime()
        self._forward: dict[tuple[object, ...], ForwardLaunch] = {}
        self._backward: dict[tuple[object, ...], BackwardLaunch] = {}
        self._asked = watch("MAGI_ATTENTION_INDEX_FORWARD", "MAGI_ATTENTION_INDEX_BACKWARD")

    @property
    def _library(self) -> IndexLibrary:
        return self._given or load_index()

    def why_not(self, problem: IndexProblem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda" or p.capability not in SM90.capabilities:
            return f"The kernels of index attention run on GPUs of compute capability 9.0, not on {p.device_type} " + (
                f"tensors of capability {p.capability}." if p.device_type == "cuda" else "tensors."
            )
        if env.is_portable_kernels():
            return "MAGI_ATTENTION_PORTABLE_KERNELS=1 asks for portable kernels, and index attention has none."
        if p.dtype not in DTYPES:
            return f"The kernels compute bfloat16 and float16, not {p.dtype}."
        if p.options.softcap or not p.options.softmax_scale > 0:
            return "The kernels have no softcap, and need a softmax_scale above 0."
        if p.head_dim % 8 or p.head_dim_v % 8:
            return f"Head dims {p.head_dim} and {p.head_dim_v} are not both multiples of 8."
        return why_absent(SM90.library) or self._why_no_kernel(p)

    def _why_no_kernel(self, p: IndexProblem) -> str | None:
        library = self._library
        takes_v = p.has_v or library.has(DTYPES[p.dtype], p.head_dim, p.head_dim_v)
        if not library.has(DTYPES[p.dtype], p.head_dim, p.head_dim_v, takes_v):
            form = "" if takes_v else " of values that are columns of k"
            return f"There is no kernel of index attention for head dims {p.head_dim} and {p.head_dim_v}{form}."
        tiles = library.tiles(p.num_heads_q, p.num_heads_kv, p.q_block_size, takes_v)
        if not tiles:
            return (
                f"{p.num_heads_q // p.num_heads_kv} query heads on a kv head and lists of {p.q_block_size} queries do "
                "not fit the tiles of the kernels."
            )
        width = 4 * p.num_heads_kv * tiles * (p.head_dim + p.head_dim_v * takes_v)
        if p.options.deterministic and p.needs_backward and p.topk * p.k_block_size * width > MOST_SHARES_BYTES:
            keys = f"{p.topk} blocks of {p.k_block_size} keys"
            return f"A deterministic backward of lists of {keys} would leave more than {MOST_SHARES_BYTES} bytes each."
        return None

    def forward(
        self, problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, runtime = q.get_device(), self._runtime
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.forward(problem, q, k, v, lists)
        key = (*_key(problem, index, q, k, v, lists), *self._asked())
        call = self._forward.get(key)
        if call is None:
            call = prepare_forward(self._library, problem, q, k, v, lists)
            remember(self._forward, key, call)
        at = _addresses(q, k, v, call.takes_columns)
        if call.is_unusual or (at[0] | at[1] | at[2]) & 15:
            return self.forward(problem, dense(q), dense(k), None if v is None else dense(v), lists)
        out, lse = _empty_like(call.out_like), _empty_like(call.lse_like)
        made = (*at, out.data_ptr(), lse.data_ptr(), lists.rows.data_ptr())
        stream = runtime.stream(index)
        if call.work_like is None:
            counts, starts = _seen(lists)  # held until the launch
            tail = _pack_forward(*made, counts.data_ptr(), 0 if starts is None else starts.data_ptr(), stream)
        else:
            work = _empty_like(call.work_like)
            tail = _pack_blocks(*made, lists.counts.data_ptr(), work.data_ptr(), stream)
        status = call.raw(call.prefix + tail)
        if status:
            call.library.check(status, "Index attention forward")
        return out, lse

    def backward(
        self, problem: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices, delta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        index, runtime = q.get_device(), self._runtime
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self.backward(problem, dout, q, k, v, out, lse, lists, delta)
        read = (dout, out, lse) if delta is None else (dout, out, lse, delta)
        layouts = [(x.stride(), x.dtype) for x in read]
        key = (*_key(problem, index, q, k, v, lists), *layouts, *self._asked())
        call = self._backward.get(key)
        if call is None:
            is_plain = dout.dtype == out.dtype == q.dtype and all(_is_plain(x) for x in read[2:])
            call = prepare_backward(self._library, problem, dout, q, k, v, out, lists, is_plain)
            remember(self._backward, key, call)
        at = (*_addresses(q, k, v, call.takes_columns), out.data_ptr(), dout.data_ptr())
        if call.is_unusual or (at[0] | at[1] | at[2] | at[3] | at[4]) & 15:
            dout, out = dense(dout.to(q.dtype)), dense(out.to(q.dtype))
            q, k, v = dense(q), dense(k), None if v is None else dense(v)
            delta = None if delta is None else _plain(delta)
            return self.backward(problem, dout, q, k, v, out, _plain(lse), lists, delta)
        if delta is not None:  # instead of out
            at = (*at[:3], 0, at[4])
        run = self._backward_by_queries if call.work_like is None else self._backward_by_keys
        dq, (dk, *dv) = run(call, at, lse, delta, lists, runtime.stream(index))
        if problem.has_v:
            return dq, dk, dv[0]
        dk = dk.float()
        if dv:
            dk[..., : problem.head_dim_v] += dv[0]
        return dq, dk, None

    @staticmethod
    def _backward_by_queries(
        call: BackwardLaunch, at: tuple[int, ...], lse: torch.Tensor, delta: torch.Tensor | None,
        lists: PreparedIndices, stream: int,
    ) -> _Grads:  # fmt: skip
        """dq in q's dtype, the others in float32."""
        library, dq = call.library, _empty_like(call.dq_like)
        delta = _empty_like(call.delta_like) if delta is None else delta
        grads = [_zeros_like(like) for like in call.grad_likes]
        counts, starts = _seen(lists)
        rows = (lse.data_ptr(), delta.data_ptr(), dq.data_ptr(), *_both(grads))
        ends = (lists.rows.data_ptr(), counts.data_ptr(), 0 if starts is None else starts.data_ptr(), stream)
        if not call.parts:
            status = library.backward_raw(call.prefix + _pack_backward(*at, *rows, 0, 0, *ends))
            if status:
                library.check(status, BACKWARD)
        else:
            lists = with_readers(lists)
            assert lists.readers is not None and lists.reader_begins is not None
            inverted = lists.readers.data_ptr(), lists.reader_begins.data_ptr(), counts.data_ptr()
        for part in call.parts:
            shares = [_empty_like(like) for like in part.share_likes]
            status = library.backward_raw(part.prefix + _pack_backward(*at, *rows, *_both(shares), *ends))
            for prefix, share, grad in zip(part.sum_prefixes, shares, grads):
                tail = _pack_sum(*inverted, share.data_ptr(), grad.data_ptr(), stream)
                status = status or library.sum_raw(prefix + tail)
            if status:
                library.check(status, BACKWARD)
            at = (*at[:3], 0, at[4])  # later parts read the delta that the first one wrote
        if len(grads) == 2:  # else the kernel has scaled dk, as the gradient of the values is in it
            grads[0].mul_(call.problem.options.softmax_scale)
        return dq, grads

    @staticmethod
    def _backward_by_keys(
        call: BackwardLaunch, at: tuple[int, ...], lse: torch.Tensor, delta: torch.Tensor | None,
        lists: PreparedIndices, stream: int,
    ) -> _Grads:  # fmt: skip
        """All gradients in q's dtype."""
        assert call.work_like is not None
        dq, work = _empty_like(call.dq_like), _empty_like(call.work_like)
        grads = [_empty_like(like) for like in call.grad_likes]
        tail = _pack_keys(
            *at, lse.data_ptr(), 0 if delta is None else delta.data_ptr(), dq.data_ptr(), *_both(grads),
            lists.rows.data_ptr(), lists.counts.data_ptr(), work.data_ptr(), stream,
        )  # fmt: skip
        status = call.library.backward_keys_raw(call.prefix + tail)
        if status:
            call.library.check(status, BACKWARD)
        return dq, grads


def _key(
    problem: IndexProblem, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices
) -> tuple[object, ...]:
    """What a call depends on. Head dims, dtype, options and what one list is are those of the problem."""
    return (
        id(problem), index, q.shape[0], k.shape[0], q.stride(), k.stride(), None if v is None else v.stride(),
        lists.k_start is None, lists.k_end is None,
    )  # fmt: skip


def _addresses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, takes_columns: bool) -> tuple[int, int, int]:
    """q, k and v. Without a v the kernel gets columns of k if it ``takes_columns``, else none."""
    k_at = k.data_ptr()
    return q.data_ptr(), k_at, v.data_ptr() if v is not None else k_at if takes_columns else 0


def _both(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Addresses of dk and dv, or of what stands for them; 0 where there is no dv."""
    return tensors[0].data_ptr(), tensors[1].data_ptr() if len(tensors) == 2 else 0


def _seen(lists: PreparedIndices) -> tuple[torch.Tensor, torch.Tensor | None]:
    """How many keys each list sees, and where its blocks are counted from."""
    return key_counts(lists), None if lists.k_start is None else lists.k_start.int()


def _is_plain(x: torch.Tensor) -> bool:
    """Is a number of each row and head as kernels read it?"""
    return x.dtype == torch.float32 and x.is_contiguous()


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


__all__ = ["IndexFfa"]
