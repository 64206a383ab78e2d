# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch over nodes, without GPUs: the attention kernels for Hopper and those of the exchange, all
compiled for the CPU, in a process for each rank, beside float64."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import truth

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, OverlapConfig, make_plan
from magi_attention.comm.collectives.hierarchical import join_nodes
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.comm.transport.torch import TorchTransport, as_transport
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.errors import PeerFailureError, UnsupportedError
from magi_attention.functional import runtime
from magi_attention.functional.one_launch import choice as one_launch_choice
from magi_attention.functional.one_launch.nodes import NodeFusedAttention
from magi_attention.kernels import default_registry
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Operands
from magi_attention.native.comm import symm
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip, planner_or_skip
from magi_attention.testing.masks import random_slices
from magi_attention.testing.spawn import RankFailure, run_processes
from magi_attention.testing.waiting import DEADLINE_S

sys.path += [str(Path(__file__).parents[1] / name) for name in ("comm", "kernels/harness")]
from cpu_verbs import CpuFactory, compiled  # noqa: E402
from hopper_library import FLAGS, STAND_INS, hopper_on_cpu  # noqa: E402

SOURCE = Path(__file__).with_name("one_launch_on_cpu.cpp")
HEADS, DIM, CPU = (4, 2), 64, torch.device("cpu")
ROWS = 192  # of a rank: a tile, and half of one


@pytest.fixture(scope="module")
def libraries(compile_folder) -> tuple[str, str]:
    """The libraries of the exchange and of attention."""
    planner_or_skip()
    csrc, folder = csrc_or_skip(), compile_folder / "one_launch"

    def write_sources() -> None:
        text = (csrc / "comm" / "symm" / "reduce.cu").read_text()
        (folder / "symm_reduce.cuh").write_text(re.split(r'extern "C"', text)[0])

    includes = [folder, STAND_INS, csrc, csrc / "include"]
    attention = compiled_or_skip(folder, [SOURCE], includes, *FLAGS, prepare=write_sources)
    return compiled(compile_folder), attention._name


class Summing:
    """In place of the library that adds rows: the same kernel on the emulated device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def magi_symm_reduce(self, params: bytes) -> int:
        status, error = self._library.magi_symm_reduce(params), self._library.synchronize()
        assert error is None, error.decode()
        return status


def problem(seed: int, world: int, rows: int):
    total = rows * world - seed % 3 * 5
    rng = np.random.default_rng(seed)
    table = np.array([[0, total, 0, total, 1]]) if seed % 2 else random_slices(rng, total, total, max_slices=6)
    config = DistAttnConfig(DispatchConfig(rows // 4), OverlapConfig(degree=1 + seed % 2, min_chunk_size=16))
    mask = Mask(SliceTable(table), total, total)
    plan = make_plan(mask, world, config=config, num_heads_q=HEADS[0], num_heads_kv=HEADS[1], head_dim=DIM)
    gen = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(total, h, DIM, generator=gen) for h in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return plan, torch.from_numpy(to_dense(table, total, total)), [x.to(torch.bfloat16) for x in tensors]


def attention(hopper, one: NodeFusedAttention, plan, t, tensors, options: AttnOptions, seed: int):
    """out, lse, dq, dk and dv of this rank's tokens; ``seed``: of the order of threads."""
    q, k, v, dout = (plan.shard(x, t).contiguous() for x in tensors)
    hopper.use(3, seed)
    call = one.part.slices, options
    out, lse, _ = one.forward(hopper.backend, Operands(q, k, v, *call))
    grads = one.backward(hopper.backend, BackwardOperands(dout, q, k, v, out, lse, *call))
    return [out, lse, grads.dq, grads.dk, grads.dv]


def main(
    rank: int, world: int, libraries: tuple[str, str], folder: str, sizes: tuple[int, ...], seeds: tuple[int, ...]
) -> list[tuple[int, list[torch.Tensor]]]:
    exchange, path = libraries
    t = as_transport(dist.new_group())
    CpuFactory(exchange, Path(folder)).attach(t)
    group = exchange_group(t, Nodes.of_sizes(sizes, range(world)), CPU, "nvshmem")
    library, found = ctypes.CDLL(path), []
    with hopper_on_cpu(library) as hopper, pytest.MonkeyPatch.context() as patch:
        library.synchronize.restype = ctypes.c_char_p
        patch.setattr(symm, "load", lambda name: Summing(library))
        for seed in seeds:
            plan, _, tensors = problem(seed, world, ROWS)
            one = NodeFusedAttention(plan, group, high_precision_reduce=seed % 4 == 3)
            options = AttnOptions(DIM**-0.5, deterministic=seed % 3 == 0)
            first, again = (attention(hopper, one, plan, t, tensors, options, 10 * seed + i) for i in range(2))
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), first, again):
                is_exact = name != "dq" or options.deterministic
                assert not is_exact or torch.equal(a, b), f"seed {seed}: {name} has other bits again"
            group.check("the test")
            found.append((seed, [plan.gather(x, t) for x in first]))
    return found


# By day with and without determinism on each world, and sums in float32.
BY_DAY = [((1, 1), (2, 3)), ((2, 2), (5, 6))]
BY_NIGHT = [pytest.param(*x, marks=pytest.mark.nightly) for x in (((1, 1), (0, 1)), ((2, 2), (4,)), ((3, 1), (7, 8)))]


@pytest.mark.parametrize("sizes, seeds", [*BY_DAY, *BY_NIGHT])
def test_attention_beside_float64(libraries, tmp_path, sizes, seeds) -> None:
    world = sum(sizes)
    results = run_processes(world, main, libraries, str(tmp_path), sizes, seeds)
    for seed, got in results[0]:
        _, mask, tensors = problem(seed, world, ROWS)
        want = truth(*(x.double() for x in tensors[:3]), mask, tensors[3].double(), DIM**-0.5)
        for name, x in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:])):
            exact = getattr(want, name)
            error = float((x.double() - exact).abs().max() / exact.abs().max())
            assert error < 2e-2, f"seed {seed}: {name} is off by {error:.3g}"


# ---- choice ---------------------------------------------------------------------------------------------------------
CHOICES = [("auto", "auto", True), ("fused", "nvshmem", True), ("auto", "all_to_all", False)]


@pytest.mark.parametrize("mode, transport, is_one_launch", CHOICES)
def test_choice(libraries, tmp_path, monkeypatch, mode, transport, is_one_launch) -> None:
    """As on Hopper GPUs. All ranks choose alike, and one launch that was asked for is an error where there is none."""
    monkeypatch.setattr(one_launch_choice, "why_no_kernels_beside", lambda t: None)
    plan, _, _ = problem(1, 4, 64)

    def choice(t, mode: str, transport: str):
        policy = runtime.AttnPolicy(stage_mode=mode, node_transport=transport)
        levels = join_nodes(t, (2,), None)
        return runtime.AttnRuntime(plan, t, default_registry(), policy, levels)._decide(CPU)

    def main(t):
        CpuFactory(libraries[0], tmp_path).attach(t)
        with pytest.raises(UnsupportedError, match="MAGI_ATTENTION_NATIVE_GRPCOLL=1 cannot be done"):
            choice(t, "fused", "all_to_all")
        return type(choice(t, mode, transport))

    wanted = NodeFusedAttention if is_one_launch else type(None)
    assert FakeWorld(4).run(main) == [wanted] * 4


# ---- a rank that is killed ------------------------------------------------------------------------------------------
def death(rank: int, world: int, libraries: tuple[str, str], folder: str, verb: str) -> None:
    """The last rank is killed right before a launch: rows of the forward, or of gradients. All others name it."""
    t = TorchTransport(dist.new_group(), timeout_s=12)
    factory = CpuFactory(libraries[0], Path(folder)).attach(t)
    group = exchange_group(t, Nodes.of_sizes((2, 1), range(world)), CPU, "nvshmem")
    library = ctypes.CDLL(libraries[1])
    with hopper_on_cpu(library) as hopper, pytest.MonkeyPatch.context() as patch:
        library.synchronize.restype = ctypes.c_char_p
        patch.setattr(symm, "load", lambda name: Summing(library))
        plan, _, tensors = problem(1, world, 128)
        one = NodeFusedAttention(plan, group, high_precision_reduce=False)
        args = (hopper, one, plan, t, tensors, AttnOptions(DIM**-0.5))
        attention(*args, 1)

        def before(name: str) -> None:
            if name == verb:
                os.kill(os.getpid(), signal.SIGKILL)

        factory.verbs.before = before if rank == world - 1 else factory.verbs.before
        with pytest.raises(PeerFailureError) as info:
            for i in range(4):
                attention(*args, 2 + i)
        text = str(info.value)
        assert f"Rank {world - 1} (node 1) did not deliver within 12 s" in text, text
        assert "make a new process group" in text, text
        with pytest.raises(PeerFailureError, match="make a new"):
            attention(*args, 9)


@pytest.mark.parametrize("verb", [pytest.param("relay", marks=pytest.mark.nightly), "sum"])
def test_a_rank_that_is_killed_is_named(libraries, tmp_path, verb) -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 2 ---\ndied with exit code -9"):
        run_processes(3, death, libraries, str(tmp_path), verb, grace_s=DEADLINE_S)
