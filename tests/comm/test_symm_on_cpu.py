# SPDX-License-Identifier: Apache-2.0
"""The kernels that move and add rows over NVLink, compiled for the CPU: what arrives where, and in which order it is
added, for the tables of attention in one launch. Those of group collectives: ``test_symm_collective.py``."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from symm_library import compiled

from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_attention.meta.one_launch.fused_layout import TILE, FusedLayout
from magi_attention.meta.planner import build_plan
from magi_attention.native import abi
from magi_attention.testing.masks import random_slices

CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}


@pytest.fixture(scope="module")
def library(compile_folder):
    return compiled(compile_folder)


def at(x: torch.Tensor | np.ndarray | None) -> int | None:
    return None if x is None else x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data


def fill(kind, **fields):
    params = kind(version=abi.ABI_VERSION)
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                getattr(params, name)[i] = item
        else:
            setattr(params, name, value)
    return params


class Buffers:
    """One buffer for each rank, in this process."""

    def __init__(self, library, world: int, data_bytes: int) -> None:
        self.control, self.world = library.control_bytes(world), world
        self.memory = [torch.zeros(self.control + data_bytes + 64, dtype=torch.uint8) for _ in range(world)]
        for memory in self.memory:
            memory[self.control :] = 0xFF  # NaN in floats
        self._held = torch.tensor([at(m) for m in self.memory])
        self.failed_peer = np.zeros(1, dtype=np.int32)

    def of(self, rank: int) -> abi.SymmBuffer:
        return abi.SymmBuffer(own=at(self.memory[rank]), of_rank=at(self._held))

    def common(self, rank: int) -> dict:
        return {"rank": rank, "world": self.world, "timeout_ms": 20_000, "failed_peer": at(self.failed_peer)}

    def word(self, rank: int, number: int) -> int:
        return int(self.memory[rank][: self.control].view(torch.int32)[number * abi.SYMM_WORD_BYTES // 4])

    def arrived(self, rank: int, signal: int) -> int:
        return self.word(rank, 3 + self.world + signal)

    def rows(self, rank: int, begin: int, count: int, values: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * values * dtype.itemsize
        return self.memory[rank][begin : begin + size].view(dtype).view(count, values)

    def assert_between_uses(self, use: int) -> None:
        groups = abi.SYMM_SIGNALS_PER_RANK * self.world
        for rank in range(self.world):
            assert self.word(rank, 0) == self.word(rank, 1) == use, "uses that are over, and puts"
            idle = [2, *range(3 + self.world + groups, 5 + self.world + 2 * groups)]
            assert not any(self.word(rank, n) for n in idle), "counters are 0 between uses"
        assert not self.failed_peer.any()


def put_of(buffers: Buffers, rank: int, table, sources, data_at, ctas: int):
    sizes = [x.shape[1] * x.element_size() for x in sources]
    strides = [x.stride(0) * x.element_size() if len(x) > 1 else n for x, n in zip(sources, sizes)]
    return fill(
        abi.SymmPutParams, **buffers.common(rank), num_tensors=len(sources), num_transfers=len(table.transfers),
        num_ctas=ctas, buffer=buffers.of(rank), transfers=at(np.ascontiguousarray(table.transfers)),
        signals=at(np.ascontiguousarray(table.signals)),
        source_stride=strides, data_at=data_at, row_bytes=sizes, source=[at(x) for x in sources],
    )  # fmt: skip


def places_of(control: int, rows: int, widths, size: int) -> list[int]:
    return [control + rows * size * sum(widths[:i]) for i in range(len(widths))]


def draw(rng: torch.Generator, rows: int, width: int, dtype: torch.dtype, apart: bool = False) -> torch.Tensor:
    whole = torch.randn(rows, width * (1 + apart), generator=rng).to(dtype)
    return whole[:, width:] if apart else whole


def one_launch_parts(seed: int):
    rng = np.random.default_rng(seed)
    world, total = int(rng.choice((2, 3, 4, 8))), int(rng.integers(300, 900))
    dispatch = DispatchConfig(chunk_size=int(rng.integers(10, 150)))
    config = DistAttnConfig(dispatch, OverlapConfig(degree=1, min_chunk_size=16))
    slices = SliceTable(random_slices(rng, total, total, max_slices=8))
    plan = build_plan(slices, total, world, config=config)
    shared = FusedLayout(plan)
    return [shared.part(rank) for rank in range(world)]


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_one_launch(library, seed: int) -> None:
    """Keys arrive, pad rows as zeros, each signal with its last row; gradients are added in the order of the ranks."""
    parts, rng, widths, dtype = one_launch_parts(seed), torch.Generator().manual_seed(seed), (64, 136), torch.bfloat16
    world, buffer_rows, grad_rows = len(parts), parts[0].buffer_rows, parts[0].grad_rows
    assert any((p.transfers[:, 1] < 0).any() for p in parts) or seed, "zeros travel"
    wire = (torch.float32, torch.bfloat16)[seed % 2]
    keys = Buffers(library, world, max(buffer_rows, 1) * sum(widths) * 2)
    grads = Buffers(library, world, max(grad_rows, 1) * sum(widths) * wire.itemsize)
    keys_at = places_of(keys.control, buffer_rows, widths, 2)
    grads_at = places_of(grads.control, grad_rows, widths, wire.itemsize)
    for use in (1, 2, 3):
        sources = [[draw(rng, p.local_rows, w, dtype) for w in widths] for p in parts]
        for p in parts:
            library.put(ctypes.byref(put_of(keys, p.rank, p, sources[p.rank], keys_at, 3)))
        for p in parts:
            for own, here, there, count in p.transfers.tolist():
                to, signal, _, _ = p.signals[own].tolist()
                assert keys.arrived(to, signal) == use
                for t, width in enumerate(widths):
                    wanted = sources[p.rank][t][here : here + count] if here >= 0 else torch.zeros(count, width)
                    got = keys.rows(to, keys_at[t] + there * width * 2, count, width, dtype)
                    assert torch.equal(got, wanted.to(dtype)), (p.rank, to, there)
        if use == 2:  # of a forward
            for rank in range(world):
                library.release(ctypes.byref(keys.of(rank)), rank, world, 20_000, ctypes.c_void_p(at(keys.failed_peer)))
        else:
            check_gradients(library, parts, keys, grads, grads_at, widths, wire, rng)
        keys.assert_between_uses(use)
        assert all(grads.word(rank, 0) == (use + 1) // 2 and grads.word(rank, 2) == 0 for rank in range(world))


def check_gradients(library, parts, keys: Buffers, grads: Buffers, grads_at, widths, wire, rng) -> None:
    """Writes what attention would into the owners' buffers and adds it up; ends the use of both buffers."""
    sums = [[draw(rng, TILE * len(p.summed_tiles), w, torch.float32) for w in widths] for p in parts]
    outs = [[torch.full((p.local_rows, w), 7.0, dtype=torch.bfloat16) for w in widths] for p in parts]
    for p in parts:
        for owner, target in zip(p.owners.tolist(), p.target_rows.tolist()):
            for t, width in enumerate(widths):
                to = grads.rows(owner, grads_at[t] + target * width * wire.itemsize, TILE, width, wire)
                to.copy_(draw(rng, TILE, width, wire))
    held = [[np.ascontiguousarray(x) for x in (p.summed_src_rows, p.senders, p.summed_tiles)] for p in parts]
    all_params = (abi.SymmReduceParams * len(parts))(
        *(
            fill(
                abi.SymmReduceParams, **grads.common(p.rank), rows=TILE * len(p.summed_tiles),
                out_rows=p.local_rows, num_tensors=len(widths),
                wire_dtype=CODES[wire], base_dtype=abi.FP32, out_dtype=abi.BF16, row_values=list(widths),
                buffer=grads.of(p.rank), put_buffer=keys.of(p.rank), src_rows=at(held[p.rank][0]),
                tiles=at(held[p.rank][2]),
                data_at=grads_at, base=[at(x) for x in sums[p.rank]], out=[at(x) for x in outs[p.rank]],
            )
            for p in parts
        )
    )  # fmt: skip
    senders = (ctypes.c_void_p * len(parts))(*(at(x[1]) for x in held))
    library.rank_barrier(all_params, senders, len(parts))
    for i in range(len(parts)):
        library.reduce(ctypes.byref(all_params[i]), 1 + i % 3)
    for p in parts:
        for t, width in enumerate(widths):
            wanted = torch.full((len(p.summed), TILE, width), 7.0)  # where nobody adds, nothing is touched
            wanted[p.summed_tiles] = sums[p.rank][t].view(-1, TILE, width)
            wanted = wanted.view(-1, width)[: p.local_rows]
            for src_rows in p.src_rows:
                rows = np.flatnonzero(src_rows >= 0)
                of_rank = grads.rows(p.rank, grads_at[t], p.grad_rows, width, wire)
                wanted[rows] += of_rank[src_rows[rows]].float()
            assert torch.equal(outs[p.rank][t], wanted.bfloat16()), (p.rank, t)
