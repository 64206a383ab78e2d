# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels as a backend, ``"ffa"``: flexible flash attention on Hopper GPUs.

Everything that depends only on shapes is prepared once, because a short kernel runs no longer than the host takes to
launch it: a parameter block without its addresses. Each later call looks it up, allocates ``out`` and
``lse``, appends ten addresses and makes one C call.

Strides are honoured if the copy engine can: last dim 1, others multiples of 8 elements, base address a multiple
of 16 bytes. Other inputs are copied first; one log line says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from magi_attention.common.slices import SliceTable
from magi_attention.env import build as env
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels.ffa_plans import RangePlans, RangeTensors, table_plan
from magi_attention.kernels.known_calls import PreparedCall
from magi_attention.kernels.types import AttnOptions, Grads, Partial, Problem
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary, FfaTile

_log = logging.getLogger("magi_attention.kernels")

MAX_HEAD_DIM = 256
_DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16}
_MAX_PREPARED = 512
_pack_addresses = abi.FFA_FWD_POINTERS.pack
_empty_like = torch.empty_like
Final = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class CudaRuntime:
    """What a launch asks torch about the device, by the calls that take 0.1 us rather than 4."""

    def __init__(self) -> None:
        self.stream = torch._C._cuda_getCurrentRawStream  # (device index) -> address
        self.current_device = torch._C._cuda_getDevice
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing

    def on_device(self, index: int) -> Any:
        return torch.cuda.device(index)


@dataclass(frozen=True)
class _Prepared:
    """What calls of equal shapes, strides and options share."""

    library: FfaLibrary
    prefix: bytes
    workspace_bytes: int
    tile: FfaTile
    out_like: torch.Tensor  # one element, expanded: empty_like parses its arguments in half the time of empty
    lse_like: torch.Tensor
    device: torch.device
    is_unusual: bool  # there are no rows, or the copy engine cannot follow the strides
    options: AttnOptions  # held, so that its id, which is part of the key, stays taken


class FfaBackend:
    """Forward by the CUDA kernels of one library.

    ``host_planning`` plans masks given as tensors on the host, which waits for the device but checks every range;
    by default the device plans and the ranges are trusted, unless the bound of the plan is above
    ``DEVICE_PLAN_BYTES``. What an instance keeps are memos: prepared calls,
    plans, and one small workspace per stream.
    """

    name = "ffa"

    def __init__(
        self, library: FfaLibrary | None = None, runtime: CudaRuntime | None = None, host_planning: bool = False
    ) -> None:
        self.library = FfaLibrary.ahead() if library is None else library
        self._runtime = runtime
        self._prepared: dict[tuple, _Prepared] = {}
        self._workspaces: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = {}  # with address and bytes
        self._range_plans = RangePlans(self.library, host_planning)

    @property
    def runtime(self) -> CudaRuntime:
        if self._runtime is None:
            self._runtime = CudaRuntime()
        return self._runtime

    def why_not(self, problem: Problem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda":
            return f"The CUDA kernels run on NVIDIA GPUs, not on {p.device_type} tensors."
        if p.capability != (9, 0):
            return f"The kernels are built for compute capability 9.0 (H100, H200), not for {p.capability}."
        if p.dtype not in _DTYPES:
            return f"The CUDA kernels compute bfloat16 and float16, not {p.dtype}."
        for dim in (p.head_dim, p.head_dim_v):
            if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
                return f"Head dim {dim} is no multiple of 8 from 8 to {MAX_HEAD_DIM}."
        if p.num_heads_kv == 0 or p.num_heads_q == 0 or p.num_heads_q % p.num_heads_kv:
            return f"{p.num_heads_q} query heads are no multiple of {p.num_heads_kv} kv heads."
        if not p.options.softmax_scale > 0:
            return f"softmax_scale is {p.options.softmax_scale}; the CUDA kernels need a positive one."
        if p.needs_backward:
            return "The CUDA kernels have no backward yet, and an input needs a gradient."
        return None

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
            return Partial(*self._run(q, k, v, slices, options, sink, None, torch.float32))
        _check_init(init, q, v)
        # The kernel writes dense rows: buffers of other layouts go through a copy.
        work = Partial(init.out.contiguous(), init.lse.contiguous(), init.max_logits)
        if options.return_max_logits and work.max_logits is None:
            work.max_logits = init.max_logits = _minus_inf(q)
        self._run(q, k, v, slices, options, sink, work, torch.float32)
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
        return self._run(q, k, v, slices, options, sink, None, None)

    def backward(self, *_: Any, **__: Any) -> Grads:
        """Not there yet: ``why_not`` refuses problems that need it."""
        raise UnsupportedError("The CUDA kernels have no backward yet; use backend 'sdpa_ol' for training.")

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
        call = self._prepared.get(_key(q, k, v, options, sink, None, None))
        runtime, index = self.runtime, q.get_device()
        if call is None or call.is_unusual or index != runtime.current_device() or runtime.is_capturing():
            return None
        stream = runtime.stream(index)
        plan = self._range_plans.find(mask, q.shape[0], k.shape[0], call.tile, stream)
        work, work_at, work_bytes = self._workspaces.get((index, stream), (None, 0, 0))
        if plan is None or work is None or work_bytes < call.workspace_bytes:
            return None
        library = call.library
        return PreparedCall(
            call.prefix, library.forward_address, library.check, runtime, index, stream, call.out_like, call.lse_like,
            partial(_minus_inf, call.out_like) if options.return_max_logits else None, plan, plan.data_ptr(), work,
            work_at,
        )  # fmt: skip

    def _run(self, q, k, v, mask, options, sink, into: Partial | None, out_dtype: torch.dtype | None) -> Final:
        runtime, index = self.runtime, q.get_device()
        if index != runtime.current_device():
            with runtime.on_device(index):
                return self._run(q, k, v, mask, options, sink, into, out_dtype)
        key = _key(q, k, v, options, sink, into, out_dtype)
        call = self._prepared.get(key)
        if call is None:
            call = self._prepare(key, q, k, v, options, sink, into, out_dtype)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if call.is_unusual or (addresses[0] | addresses[1] | addresses[2]) & 15:
            if 0 in call.out_like.shape or not k.shape[0]:
                return self._run_empty(q, k, v, options, sink, into, out_dtype, call)
            q, k, v = (_dense(x) for x in (q, k, v))
            return self._run(q, k, v, mask, options, sink, into, out_dtype)
        stream, capturing = runtime.stream(index), runtime.is_capturing()
        plan, plan_at = self._plan(mask, q, k, call.tile, stream, capturing)
        return self._launch(call, addresses, sink, into, plan_at, index, stream, capturing)

    def _launch(self, call, addresses, sink, into, plan_at, index, stream, capturing) -> Final:
        if into is None:
            out, lse = _empty_like(call.out_like), _empty_like(call.lse_like)
            max_logits = _minus_inf(call.out_like) if call.options.return_max_logits else None
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
        )  # fmt: skip
        status = call.library.forward_raw(call.prefix + tail)
        if status:
            call.library.check(status, "Attention forward")
        return out, lse, max_logits

    def _plan(self, mask, q, k, tile: FfaTile, stream: int, capturing: bool) -> tuple[torch.Tensor, int]:
        """The plan tensor, to be held until the launch, and its address."""
        total_q, total_k = q.shape[0], k.shape[0]
        if isinstance(mask, SliceTable):
            cache = mask.__dict__.setdefault("_ffa_plans", {})
            key = (total_q, total_k, tile, q.get_device())
            kept = cache.get(key)
            if kept is None:
                plan = table_plan(mask, total_q, total_k, tile, q.device)
                kept = cache[key] = (plan, plan.data_ptr())
            return kept
        plan = self._range_plans.get(mask, total_q, total_k, tile, stream, capturing)
        return plan, plan.data_ptr()

    def _make_workspace(
        self, call: _Prepared, index: int, stream: int, capturing: bool
    ) -> tuple[torch.Tensor, int, int]:
        tensor = torch.zeros(call.workspace_bytes, dtype=torch.uint8, device=call.device)
        work = (tensor, tensor.data_ptr(), call.workspace_bytes)
        if not capturing:  # a graph may be replayed beside other work, so a captured call gets its own
            self._workspaces[index, stream] = work
        return work

    def _prepare(self, key, q, k, v, options, sink, into, out_dtype) -> _Prepared:
        """Checks shapes and dtypes, then fills the parameter block; remembered under ``key``."""
        _check_shapes(q, k, v)
        tokens, heads, dim = q.shape
        library = self._library_for(q.dtype, dim, v.shape[2])
        tile = library.tile(heads, k.shape[1], dim, v.shape[2])
        out_dtype = q.dtype if out_dtype is None else out_dtype
        out_shape, lse_shape = (tokens, heads, v.shape[2]), (tokens, heads)
        sink_count = 0 if sink is None else sink.shape[0 if options.sink_layout == "sh" else 1]
        strides: dict[str, int] = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            strides[f"{name}_stride_token"], strides[f"{name}_stride_head"] = _strides(x)
        prefix, workspace_bytes = library.prefix(
            dtype=_DTYPES[q.dtype], out_dtype=abi.FP32 if out_dtype == torch.float32 else _DTYPES[out_dtype],
            total_q=tokens, total_k=k.shape[0], heads_q=heads, heads_kv=k.shape[1], head_dim=dim,
            head_dim_v=v.shape[2], pack=tile.pack, tile_tokens=tile.tokens, accumulate=int(into is not None),
            sm_margin=options.sm_margin, sink_count=sink_count, sink_per_row=int(options.sink_layout == "ssh"),
            softmax_scale=options.softmax_scale, softcap=options.softcap, **strides,
            out_stride_token=heads * v.shape[2], out_stride_head=v.shape[2],
        )  # fmt: skip
        is_empty = 0 in out_shape or k.shape[0] == 0
        odd = [f"{n} {tuple(x.stride())}" for n, x in (("q", q), ("k", k), ("v", v)) if not _is_loadable(x)]
        if odd and not is_empty:
            _log_copy(", ".join(odd))
        out_like, lse_like = q.new_empty((), dtype=out_dtype), q.new_empty((), dtype=torch.float32)
        prepared = _Prepared(
            library, prefix, workspace_bytes, tile, out_like.expand(out_shape), lse_like.expand(lse_shape),
            q.device, is_empty or bool(odd), options,
        )  # fmt: skip
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[key] = prepared
        return prepared

    def _library_for(self, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> FfaLibrary:
        """The library built ahead, or with MAGI_ATTENTION_FORCE_JIT_BUILD=1 one compiled for these head dims."""
        if not env.is_force_jit_build():
            return self.library
        from magi_attention.native import jit  # the compiler drivers, which a training run does not need

        return FfaLibrary(jit.load_variant("bf16" if dtype == torch.bfloat16 else "fp16", head_dim, head_dim_v))

    def _run_empty(self, q, k, v, options, sink, into, out_dtype, call: _Prepared) -> Final:
        """No query rows: nothing to do. No key rows: one key that nobody sees, so that a sink still counts."""
        if 0 not in call.out_like.shape:
            k, v = (q.new_zeros((1, *x.shape[1:])) for x in (k, v))
            return self._run(q, k, v, SliceTable(_NO_SLICES), options, sink, into, out_dtype)
        if into is not None:
            return into.out, into.lse, into.max_logits
        out, lse = torch.empty_like(call.out_like), torch.empty_like(call.lse_like)
        return out, lse, _minus_inf(q) if options.return_max_logits else None


def _key(q, k, v, options, sink, into, out_dtype) -> tuple:
    return (
        q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(), v.shape,
        v.stride(), v.dtype, v.get_device(), id(options),
        None if sink is None else (sink.shape, sink.get_device()), into is None, out_dtype,
    )  # fmt: skip


_NO_SLICES = SliceTable([]).array


def _minus_inf(q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[1],), float("-inf"), dtype=torch.float32, device=q.device)


def _strides(x_THD: torch.Tensor) -> tuple[int, int]:
    """Token and head stride in elements; of a dim of size 1, where any is right, a multiple of 8."""
    dense = (x_THD.shape[1] * x_THD.shape[2], x_THD.shape[2])
    return tuple(x_THD.stride(i) if x_THD.shape[i] > 1 else dense[i] for i in (0, 1))  # type: ignore[return-value]


def _is_loadable(x_THD: torch.Tensor) -> bool:
    token, head = _strides(x_THD)
    return x_THD.stride(2) == 1 and token % 8 == 0 and head % 8 == 0 and token > 0 and head > 0


def _dense(x: torch.Tensor) -> torch.Tensor:
    is_fine = _is_loadable(x) and not x.data_ptr() & 15
    return x if is_fine else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _log_copy(what: str) -> None:
    # The memo makes it once per process and layout; it holds no result.
    _log.warning(
        "Strides of %s do not suit the GPU's copy engine, so each call copies them; make the last dim contiguous "
        "and the other strides multiples of 8 elements.",
        what,
    )


def _check_shapes(q, k, v) -> None:
    shapes = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ContractError(f"{shapes} do not fit; give (tokens, heads, head dim) each, as many rows in k and v.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES or not q.device == k.device == v.device:
        raise ContractError(f"{shapes}: cast all three to bfloat16 or all to float16, on one device.")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ContractError(f"{shapes}: the number of query heads must be a multiple of that of kv heads.")
    for dim in (q.shape[2], v.shape[2]):
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise ContractError(f"{shapes}: head dims must be multiples of 8 up to {MAX_HEAD_DIM}; pad them.")
    if max(q.shape[0], k.shape[0]) >= 2**31:
        raise ContractError(f"{shapes}: fewer than 2**31 tokens fit; split the sequence.")


def _check_init(init: Partial, q: torch.Tensor, v: torch.Tensor) -> None:
    wanted = {"out": (*q.shape[:2], v.shape[2]), "lse": tuple(q.shape[:2])}
    for name, shape in wanted.items():
        x = getattr(init, name)
        if tuple(x.shape) != shape or x.dtype != torch.float32:
            have = f"{tuple(x.shape)} {x.dtype}"
            raise ContractError(f"The accumulation buffer {name} is {have}; make it {shape} float32.")
