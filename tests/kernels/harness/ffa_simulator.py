# SPDX-License-Identifier: Apache-2.0
"""Stands for the CUDA library in tests on a CPU: takes the same bytes, reads and writes through raw addresses.

The mask comes from the tile plan alone, and attention is that of the dense backend. So what is tested is everything
between the Python call and the launch; the kernels themselves are emulated in tests of their own.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Partial, Registry, SdpaBackend
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import abi
from magi_attention.native.ffa import BackwardNeeds, FfaTile, ForwardTiles
from magi_attention.native.loader import check, load
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER

DTYPES = {abi.BF16: torch.bfloat16, abi.FP16: torch.float16, abi.FP32: torch.float32}


def memory(address: int, shape, strides, kind) -> np.ndarray:
    """Strided view of raw memory; ``strides`` in elements."""
    size = np.dtype(kind).itemsize
    span = size * (1 + sum((n - 1) * s for n, s in zip(shape, strides)))
    raw = (ctypes.c_char * span).from_address(address)
    base = np.frombuffer(raw, dtype=kind)
    return np.lib.stride_tricks.as_strided(base, shape, [s * size for s in strides])


def view(address: int, shape, dtype: torch.dtype, strides=None) -> torch.Tensor:
    """The same as a tensor; contiguous without ``strides``."""
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.from_numpy(memory(address, shape, strides, f"i{dtype.itemsize}")).view(dtype)


def operand(p, name: str, rows: int, heads: int, dim: int) -> torch.Tensor:
    """(rows, heads, dim) in float64, from the address and strides of parameters ``p``."""
    strides = getattr(p, f"{name}_stride_token"), getattr(p, f"{name}_stride_head"), 1
    return view(getattr(p, name), (rows, heads, dim), DTYPES[p.dtype], strides).double()


def operands(p) -> list[torch.Tensor]:
    """q, k and v."""
    q, kv = (p.total_q, p.heads_q), (p.total_k, p.heads_kv)
    sizes = (*q, p.head_dim), (*kv, p.head_dim), (*kv, p.head_dim_v)
    return [operand(p, name, *size) for name, size in zip("qkv", sizes)]


def plan_at(address: int) -> TilePlan:
    header = abi.TilePlanHeader.from_address(address)
    return TilePlan(memory(address, (header.words_total,), (1,), np.int32).copy())


def slices_of(plan: TilePlan, is_transposed: bool) -> SliceTable:
    """The mask by the plan alone: a slice for each interval of each row."""
    rows = []
    for token0, count, begin, segments, *_ in plan.tiles.tolist():
        for record in plan.intervals[begin : begin + segments].tolist():
            rows += [[token0 + i, token0 + i + 1, *record[i], 0] for i in range(count) if record[i][0] < record[i][1]]
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return SliceTable(table[:, [2, 3, 0, 1, 4]] if is_transposed else table)


class Simulator:
    """The interface of ``FfaLibrary``."""

    workspace_bytes = 4096
    order_bytes = 64
    takes_list = False
    tail = (0, 1)

    def __init__(self, tile_rows: int = 16) -> None:
        self.tile_rows = tile_rows
        self.calls: list[abi.FfaFwdParams] = []
        self.backward_calls: list[abi.FfaBwdParams] = []
        self.lacking: set[tuple[str, int, int]] = set()  # kind and head dims without a kernel
        self.transposed = 0
        self.plans_made = 0
        self.status = abi.OK
        self.error: Exception | None = None  # of a call through the address, which no exception can leave
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(self._forward_at)  # held
        self.forward_address = ctypes.cast(self._entry, ctypes.c_void_p).value

    def _forward_at(self, address: int) -> int:
        try:
            return self.forward_raw(ctypes.string_at(address, ctypes.sizeof(abi.FfaFwdParams)))
        except Exception as error:
            self.error = error
            return abi.CUDA_ERROR

    def magi_last_error(self) -> bytes:
        return b"the simulator was told to fail."

    def check(self, status: int, what: str) -> None:
        if self.error is not None:
            raise self.error
        check(self, status, what)

    def has(self, kind: str, dtype: int, head_dim: int, head_dim_v: int) -> bool:
        return (kind, head_dim, head_dim_v) not in self.lacking

    def tiles(self, dtype: int, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int) -> ForwardTiles:
        pack = heads_q // heads_kv
        return ForwardTiles(FfaTile(self.tile_rows // pack if self.tile_rows % pack == 0 else self.tile_rows, 2, pack))

    def prefix(self, **fields: int | float) -> tuple[bytes, int]:
        params = abi.FfaFwdParams(version=abi.ABI_VERSION, workspace_bytes=self.workspace_bytes, **fields)
        return bytes(params)[: abi.FFA_FWD_PREFIX_BYTES], self.workspace_bytes

    def plan_on_device(
        self, q_ranges, k_ranges, types, num_slices, total_q, total_k, tile, plan, plan_words, stream
    ) -> None:
        self.plans_made += 1
        q, k = (memory(x, (num_slices, 2), (2, 1), np.int32) for x in (q_ranges, k_ranges))
        kinds = np.zeros(num_slices) if types is None else memory(types, (num_slices,), (1,), np.int32)
        made = TilePlan.build(np.column_stack([q, k, kinds]), total_q, total_k, tile.tokens, tile.groups)
        assert len(made.words) <= plan_words
        memory(plan, made.words.shape, (1,), np.int32)[:] = made.words

    def backward_tile(self, head_dim: int, head_dim_v: int) -> FfaTile:
        return FfaTile(self.tile_rows, 2, 1)

    def backward_prefix(self, **fields: int | float) -> tuple[bytes, BackwardNeeds]:
        params = abi.FfaBwdParams(version=abi.ABI_VERSION, workspace_bytes=self.workspace_bytes, **fields)
        needs = BackwardNeeds(self.workspace_bytes, self.order_bytes, self.takes_list, self.tail)
        return bytes(params)[: abi.FFA_BWD_PREFIX_BYTES], needs

    def transpose_on_device(
        self, q_ranges, k_ranges, types, num_slices, total_q, total_k, row_ranges, column_ranges, new_types, stream
    ) -> None:
        self.transposed += 1
        q, k = (memory(x, (num_slices, 2), (2, 1), np.int32) for x in (q_ranges, k_ranges))
        kinds = np.zeros(num_slices) if types is None else memory(types, (num_slices,), (1,), np.int32)
        rows = np.ascontiguousarray(np.column_stack([q, k, kinds]), dtype=np.int32)
        parts = np.full((3 * num_slices, 5), -7, dtype=np.int32)
        library = load(PLANNER)
        check(library, library.magi_tile_transpose_host(rows.ctypes.data, num_slices, parts.ctypes.data), "transposing")
        memory(row_ranges, (3 * num_slices, 2), (2, 1), np.int32)[:] = parts[:, :2]
        memory(column_ranges, (3 * num_slices, 2), (2, 1), np.int32)[:] = parts[:, 2:4]
        memory(new_types, (3 * num_slices,), (1,), np.int32)[:] = parts[:, 4]

    def backward_raw(self, params: bytes) -> int:
        assert len(params) == ctypes.sizeof(abi.FfaBwdParams)
        p = abi.FfaBwdParams.from_buffer_copy(params)
        self.backward_calls.append(p)
        if self.status:
            return self.status
        assert p.version == abi.ABI_VERSION and p.stream in (7, 8, 9) and p.total_q > 0 and p.total_k > 0
        assert (p.out is None) <= (p.delta is not None), "neither out nor delta"
        assert not any((x or 0) % 16 for x in (p.q, p.k, p.v, p.out, p.dout, p.dq, p.dk, p.dv, p.plan))
        names = [name for name, _ in p._fields_ if name.endswith(("_stride_token", "_stride_head"))]
        assert not any(getattr(p, name) % 8 for name in names) and len(names) == 10
        memory(p.workspace, (p.workspace_bytes // 4,), (1,), np.int32)[:] = -7  # it is memory, and ours
        if p.order:
            self._fill(p.order, p)
        if p.work_list:
            assert self.takes_list, "a work list that was not asked for"
            assert p.work_list == p.plan + 4 * plan_at(p.plan).header.words_total
        assert p.grad_dtype == (abi.FP32 if p.accumulate else p.grad_dtype)
        plan = plan_at(p.plan)
        assert (plan.header.total_q, plan.header.total_k) == (p.total_k, p.total_q), "the plan is not transposed"
        assert not p.has_dropout, "kernels that drop are emulated"
        out_shape, lse = (p.total_q, p.heads_q, p.head_dim_v), view(p.lse, (p.total_q, p.heads_q), torch.float32)
        dout = operand(p, "dout", *out_shape)
        out = operand(p, "out", *out_shape) if p.out else torch.zeros_like(dout)
        delta = None if p.out else view(p.delta, lse.shape, torch.float32).double()
        saved = (dout, *operands(p), out, lse.double(), slices_of(plan, is_transposed=True))
        grads = SdpaBackend().backward(BackwardOperands(*saved, AttnOptions(p.softmax_scale, p.softcap), delta=delta))
        for address, grad in ((p.dq, grads.dq), (p.dk, grads.dk), (p.dv, grads.dv)):
            to = view(address, grad.shape, DTYPES[p.grad_dtype])
            to.copy_(to + grad if p.accumulate else grad)
        if p.out and p.delta:
            view(p.delta, lse.shape, torch.float32).copy_(grads.delta)
        return abi.OK

    def _fill(self, address: int, p: abi.FfaBwdParams) -> None:
        """Zero before its first call, and then as that call left it: for the same plan, stream and sizes."""
        assert self.order_bytes, "an order that was not asked for"
        owner = (p.plan, p.stream, bytes(p)[: abi.FFA_BWD_PREFIX_BYTES])
        words = memory(address, (self.order_bytes // 8,), (1,), np.int64)
        assert set(words.tolist()) == ({hash(owner)} if words[0] else {0})
        assert p.order_is_made in ((0, 1) if words[0] else (0,)), "nobody made it"
        words[:] = hash(owner)

    def forward_raw(self, params: bytes) -> int:
        assert len(params) == ctypes.sizeof(abi.FfaFwdParams)
        p = abi.FfaFwdParams.from_buffer_copy(params)
        self.calls.append(p)
        if self.status:
            return self.status
        assert p.version == abi.ABI_VERSION and p.stream == 7
        assert not any(x % 16 for x in (p.q, p.k, p.v, p.out, p.plan))
        assert not any(getattr(p, f"{x}_stride_{d}") % 8 for x in "qkv" for d in ("token", "head"))
        assert not memory(p.workspace, (p.workspace_bytes // 4,), (1,), np.int32).any()
        self._compute(p)
        return abi.OK

    def _compute(self, p: abi.FfaFwdParams) -> None:
        assert not p.has_dropout, "kernels that drop are emulated"
        sink = None
        if p.sink:
            shape = (*([p.total_q] if p.sink_per_row else []), p.sink_count, p.heads_q)
            sink = view(p.sink, shape, torch.float32).double()
        layout = "ssh" if p.sink_per_row else "sh"
        options = AttnOptions(p.softmax_scale, p.softcap, layout, return_max_logits=bool(p.max_logits))
        strides = p.out_stride_token, p.out_stride_head, 1
        out = view(p.out, (p.total_q, p.heads_q, p.head_dim_v), DTYPES[p.out_dtype], strides)
        lse = view(p.lse, (p.total_q, p.heads_q), torch.float32)
        before = Partial(out.double(), lse.double()) if p.accumulate else None
        made = SdpaBackend().forward(Operands(*operands(p), slices_of(plan_at(p.plan), False), options, sink), before)
        out.copy_(made.out)
        lse.copy_(made.lse)
        if p.max_logits:
            top = view(p.max_logits, (p.heads_q,), torch.float32)
            top.copy_(torch.maximum(top.double(), made.max_logits))


class CpuRuntime:
    """The interface of ``CudaRuntime`` for tensors on the CPU, whose device index is -1."""

    def __init__(self) -> None:
        self.capturing = False
        self.current_stream = 7
        self.said: list[tuple[str, int]] = []  # what happened to events, and on which stream
        self.has_caught_up = True  # the device, with the work that it was given
        self.copies = 0  # to the host

    def capability(self, index: int) -> tuple[int, int]:
        return 9, 0

    def stream(self, index: int) -> int:
        return self.current_stream

    def event(self) -> SimpleNamespace:
        def say(what: str, stream: int) -> None:
            self.said.append((what, stream))

        return SimpleNamespace(
            record=partial(say, "record"), wait=partial(say, "wait"), query=lambda: self.has_caught_up
        )

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        return x.clone()

    def num_sms(self, index: int) -> int:
        return 4

    def stream_object(self) -> int:
        return self.current_stream

    def current_device(self) -> int:
        return -1

    def is_capturing(self) -> bool:
        return self.capturing


class Anywhere(FfaBackend):
    """Runs on the CPU too, so that the registry picks it."""

    def why_not(self, problem):
        return None


def public_backend(monkeypatch) -> tuple[FfaBackend, Simulator]:
    """Puts ``flex_flash_attn_func`` on the simulated kernels, with nothing known."""
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    simulator = Simulator()
    ffa = Anywhere(simulator, CpuRuntime())
    registry = Registry((ffa, SdpaBackend()))
    monkeypatch.setattr(custom_ops, "default_registry", lambda: registry)
    flex_flash_attn_func.known_calls.forget()
    return ffa, simulator


def backend(**kwargs) -> tuple[FfaBackend, Simulator]:
    simulator = Simulator()
    return FfaBackend(simulator, CpuRuntime(), **kwargs), simulator


def inputs(tq, tk, heads=(4, 2), dims=(16, 16), dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    return make(tq, heads[0], dims[0]), make(tk, heads[1], dims[0]), make(tk, heads[1], dims[1])


def truth(q, k, v, slices, options, sink=None):
    sink = None if sink is None else sink.double()
    return SdpaBackend().forward(Operands(q.double(), k.double(), v.double(), slices, options, sink))


def tensors(slices: SliceTable) -> RangeTensors:
    return RangeTensors(*(x.clone() for x in slices.tensors()))


def close(got, want, tol):
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol)
