# SPDX-License-Identifier: Apache-2.0
"""The kernels that make the lists of index attention, compiled for the CPU, against the torch operations."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_library import hopper_library

from magi_attention.kernels.index_attn import prepare_ffa
from magi_attention.kernels.index_attn.prepare import blocks_op, prepare_op
from magi_attention.native.index_abi import IndexPrepareParams


class EmulatedLibrary:
    """``IndexLibrary`` over the kernels for the CPU."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.kernels, self.seed = kernels, 0

    def prepare(self, **fields: int | None) -> None:
        self._run(self.kernels.prepare_lists, fields)

    def blocks(self, **fields: int) -> None:
        self._run(self.kernels.lists_of_blocks, fields)

    def _run(self, kernel, fields: dict) -> None:
        self.seed += 1
        error = kernel(ctypes.byref(IndexPrepareParams(**fields)), self.seed)
        assert error is None, error.decode()


@pytest.fixture(scope="module")
def library(compile_folder) -> EmulatedLibrary:
    kernels = hopper_library(compile_folder / "prepare", Path(__file__).with_name("prepare_on_cpu.cpp"))
    kernels.prepare_lists.restype = kernels.lists_of_blocks.restype = ctypes.c_char_p
    return EmulatedLibrary(kernels)


@pytest.fixture(autouse=True)
def no_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 9, 1), (2, 1, 300, 20_000, 1), (4, 1, 40, 33, 4), (1, 3, 1, 1, 1), (2, 2, 0, 5, 1)], ids=str
)
def test_lists(library, shape, dtype):
    lists, heads, width, total_k, block = shape
    seed = sum(shape)
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(seed)
    most = -(-total_k // block)
    for start in (None, torch.randint(0, total_k, (lists,), generator=gen)):
        indices = torch.randint(-most // 3, most, (lists, heads, width), generator=gen).to(dtype)
        if start is not None:  # those that begin behind the last key are none on a GPU, and an error here
            first = indices.long() * block + start[:, None, None]
            indices[first >= total_k] = -1
        want = prepare_op(indices, total_k, block, start)
        got = prepare_ffa.prepare(library, indices, total_k, block, start)
        assert all(torch.equal(*pair) for pair in zip(got, want))
    beyond = torch.full((1, 1, 3), most, dtype=dtype)
    rows, counts = prepare_ffa.prepare(library, beyond, total_k, block, None)
    assert rows.tolist() == [[[-1, -1, -1]]] and counts.tolist() == [[0]]


@pytest.mark.parametrize("shape", [(5, 2, 70), (9, 1, 32), (1, 1, 1), (3, 2, 0)], ids=str)
def test_blocks(library, shape):
    gen = torch.Generator().manual_seed(sum(shape))
    for share in (0.0, 0.3, 1.0):
        blocks = torch.rand(shape, generator=gen) < share
        assert all(torch.equal(*pair) for pair in zip(prepare_ffa.of_blocks(library, blocks), blocks_op(blocks)))
