# SPDX-License-Identifier: Apache-2.0
"""Stands for the CUDA library in tests on a CPU: takes the same bytes, reads and writes through raw addresses.

The mask comes from the tile plan alone, so what is tested is everything between the Python call and the launch.
"""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import Registry, SdpaBackend
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.types import Operands
from magi_attention.native import abi
from magi_attention.native.ffa import BackwardNeeds, FfaTile
from magi_attention.native.loader import check, load
from magi_attention.native.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER


def memory(address: int, shape, strides, kind) -> np.ndarray:
    """Strided view of raw memory; ``strides`` in elements."""
    size = np.dtype(kind).itemsize
    span = size * (1 + sum((n - 1) * s for n, s in zip(shape, strides)))
    raw = (ctypes.c_char * span).from_address(address)
    base = np.frombuffer(raw, dtype=kind)
    return np.lib.stride_tricks.as_strided(base, shape, [s * size for s in strides])


def to_float(bits: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == abi.FP16:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


einsum = partial(np.einsum, optimize=True)  # by matrix products, which are far quicker


def plan_at(address: int) -> TilePlan:
    header = abi.TilePlanHeader.from_address(address)
    return TilePlan(memory(address, (header.words_total,), (1,), np.int32).copy())


def dense_mask(plan: TilePlan) -> np.ndarray:
    header = plan.header
    seen = np.zeros((header.total_q, header.total_k), dtype=int)
    for token0, count, begin, layers, *_ in plan.tiles.tolist():
        for record in plan.intervals[begin : begin + layers]:
            for i in range(count):
                seen[token0 + i, record[i, 0] : record[i, 1]] += 1
    assert seen.max(initial=0) <= 1, "a pair is visited twice"
    return seen.astype(bool)


def load_operand(p, name: str, rows: int, heads: int, dim: int) -> np.ndarray:
    """(rows, heads, dim) in float64, from the address and strides of parameters ``p``."""
    strides = (getattr(p, f"{name}_stride_token"), getattr(p, f"{name}_stride_head"), 1)
    return to_float(memory(getattr(p, name), (rows, heads, dim), strides, np.uint16), p.dtype)


def kept_weights(p) -> np.ndarray:
    """(queries, heads, keys): weights of dropout, from ``magi_dropout`` of parameters ``p``; 1 without."""
    assert bool(p.dropout) == bool(p.has_dropout)
    if not p.dropout:
        return np.ones((1, 1, 1))
    drop = abi.Dropout.from_address(p.dropout)
    q = memory(drop.q_positions, (p.total_q,), (1,), np.int32).astype(np.uint32)
    k = memory(drop.k_positions, (p.total_k,), (1,), np.int32).astype(np.uint32)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    with np.errstate(over="ignore"):
        of_head = mix(np.arange(p.heads_q, dtype=np.uint32) ^ np.uint32(drop.seed_head))
        of_row = mix(mix(q ^ np.uint32(drop.seed_q))[:, None] ^ of_head)
        pair = (of_row[..., None] ^ mix(k ^ np.uint32(drop.seed_k))) * np.uint32(0x85EBCA6B)
        pair = (pair ^ (pair >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return np.where(pair >= drop.threshold, np.float64(drop.scale), 0.0)


def gradients(p: abi.FfaBwdParams, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv and delta in float64; ``allowed`` is the dense mask (queries, keys)."""
    share = p.heads_q // p.heads_kv
    q = load_operand(p, "q", p.total_q, p.heads_q, p.head_dim)
    dout = load_operand(p, "dout", p.total_q, p.heads_q, p.head_dim_v)
    k = load_operand(p, "k", p.total_k, p.heads_kv, p.head_dim).repeat(share, axis=1)
    v = load_operand(p, "v", p.total_k, p.heads_kv, p.head_dim_v).repeat(share, axis=1)
    lse = memory(p.lse, (p.total_q, p.heads_q), (p.heads_q, 1), np.float32).astype(np.float64)
    if p.out:
        delta = (load_operand(p, "out", p.total_q, p.heads_q, p.head_dim_v) * dout).sum(-1)
    else:
        delta = memory(p.delta, (p.total_q, p.heads_q), (p.heads_q, 1), np.float32).astype(np.float64)
    nothing = np.isneginf(lse)
    delta = np.where(nothing, 0.0, delta)
    q, dout = (np.where(nothing[..., None], 0.0, x) for x in (q, dout))
    s, slope = einsum("qhd,khd->qhk", q, k) * p.softmax_scale, 1.0
    if p.softcap > 0:
        tanh = np.tanh(s / p.softcap)
        s, slope = p.softcap * tanh, 1.0 - tanh**2
    weights = np.where(allowed[:, None], np.exp(s - np.where(nothing, 0.0, lse)[..., None]), 0.0)
    kept = kept_weights(p)
    ds = weights * (einsum("qhd,khd->qhk", dout, v) * kept - delta[..., None]) * slope * p.softmax_scale
    dk, dv = einsum("qhk,qhd->khd", ds, q), einsum("qhk,qhd->khd", weights * kept, dout)
    dk, dv = (x.reshape(p.total_k, p.heads_kv, share, -1).sum(2) for x in (dk, dv))
    return einsum("qhk,khd->qhd", ds, k), dk, dv, delta


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

    def tile(self, dtype: int, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int) -> FfaTile:
        pack = heads_q // heads_kv
        return FfaTile(self.tile_rows // pack if self.tile_rows % pack == 0 else self.tile_rows, 2, pack)

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
        dq, dk, dv, delta = gradients(p, dense_mask(plan).T)
        for address, grad in ((p.dq, dq), (p.dk, dk), (p.dv, dv)):
            self._store(address, grad, p)
        if p.out and p.delta:
            memory(p.delta, delta.shape, (p.heads_q, 1), np.float32)[:] = delta
        return abi.OK

    def _fill(self, address: int, p: abi.FfaBwdParams) -> None:
        """Zero before its first call, and then as that call left it: for the same plan, stream and sizes."""
        assert self.order_bytes, "an order that was not asked for"
        owner = (p.plan, p.stream, bytes(p)[: abi.FFA_BWD_PREFIX_BYTES])
        words = memory(address, (self.order_bytes // 8,), (1,), np.int64)
        assert set(words.tolist()) == ({hash(owner)} if words[0] else {0})
        assert p.order_is_made in ((0, 1) if words[0] else (0,)), "nobody made it"
        words[:] = hash(owner)

    @staticmethod
    def _store(address: int, grad: np.ndarray, p: abi.FfaBwdParams) -> None:
        strides = (grad.shape[1] * grad.shape[2], grad.shape[2], 1)
        if p.grad_dtype == abi.FP32:
            to = memory(address, grad.shape, strides, np.float32)
            to[:] = to + grad if p.accumulate else grad
            return
        kind = torch.bfloat16 if p.grad_dtype == abi.BF16 else torch.float16
        bits = torch.from_numpy(grad).to(kind).view(torch.uint16).numpy()
        memory(address, grad.shape, strides, np.uint16)[:] = bits

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
        share = p.heads_q // p.heads_kv
        q = load_operand(p, "q", p.total_q, p.heads_q, p.head_dim)
        k = load_operand(p, "k", p.total_k, p.heads_kv, p.head_dim).repeat(share, axis=1)
        v = load_operand(p, "v", p.total_k, p.heads_kv, p.head_dim_v).repeat(share, axis=1)
        s = einsum("qhd,khd->qhk", q, k) * p.softmax_scale
        if p.softcap > 0:
            s = p.softcap * np.tanh(s / p.softcap)
        s = np.where(dense_mask(plan_at(p.plan))[:, None], s, -np.inf)
        lse_shape, lse_strides = (p.total_q, p.heads_q), (p.heads_q, 1)
        parts = [s]
        if p.sink:
            rows = p.total_q if p.sink_per_row else 1
            shape = (rows, p.sink_count, p.heads_q)
            sink = memory(p.sink, shape, (p.sink_count * p.heads_q, p.heads_q, 1), np.float32)
            parts.append(np.broadcast_to(sink, (p.total_q, *shape[1:])).transpose(0, 2, 1).astype(np.float64))
        lse_new = np.logaddexp.reduce(np.concatenate(parts, axis=2), axis=2, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            weights = np.where(np.isneginf(s), 0.0, np.exp(s - lse_new[..., None]))
        out_new = einsum("qhk,khd->qhd", weights * kept_weights(p), v)
        if p.max_logits:
            top = memory(p.max_logits, (p.heads_q,), (1,), np.float32)
            np.maximum(top, s.max(axis=(0, 2), initial=-np.inf), out=top)
        lse = memory(p.lse, lse_shape, lse_strides, np.float32)
        out_shape = (p.total_q, p.heads_q, p.head_dim_v)
        out_strides = (p.out_stride_token, p.out_stride_head, 1)
        if p.accumulate:
            out = memory(p.out, out_shape, out_strides, np.float32)
            total = np.logaddexp(lse, lse_new)
            old, new = (np.where(np.isneginf(x), 0.0, np.exp(x - np.maximum(total, -1e30))) for x in (lse, lse_new))
            out[:] = out * old[..., None] + out_new * new[..., None]
            lse[:] = total
            return
        lse[:] = lse_new
        if p.out_dtype == abi.FP32:
            memory(p.out, out_shape, out_strides, np.float32)[:] = out_new
        else:
            kind = torch.bfloat16 if p.out_dtype == abi.BF16 else torch.float16
            bits = torch.from_numpy(out_new).to(kind).view(torch.uint16).numpy()
            memory(p.out, out_shape, out_strides, np.uint16)[:] = bits


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
