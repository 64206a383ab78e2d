# SPDX-License-Identifier: Apache-2.0
"""Attention whose rows cross between nodes by one-sided transfers: the kernels of these, compiled for the CPU, beside
all-to-all-v and float64."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import truth

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, OverlapConfig, attend, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.comm.transport.torch import TorchTransport, as_transport
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.errors import PeerFailureError
from magi_attention.testing.masks import random_slices
from magi_attention.testing.spawn import RankFailure, run_processes
from magi_attention.testing.waiting import DEADLINE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
from cpu_verbs import CpuFactory, compiled  # noqa: E402

TOTAL, HEADS, DIM = 61, (4, 2), 8


@pytest.fixture(scope="module")
def library(compile_folder) -> str:
    return compiled(compile_folder)


def problem(seed, world, degree, total=TOTAL):
    table = random_slices(np.random.default_rng(seed), total, total, max_slices=8)
    config = DistAttnConfig(DispatchConfig(4), OverlapConfig(degree=degree, min_chunk_size=2))
    mask = Mask(SliceTable(table), total, total)
    plan = make_plan(mask, world, config=config, num_heads_q=HEADS[0], num_heads_kv=HEADS[1], head_dim=DIM)
    gen = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(total, h, DIM, generator=gen) for h in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return plan, torch.from_numpy(to_dense(table, total, total)), tensors


def settings(sizes, by: str | None) -> dict[str, str]:
    """The environment for nodes of these sizes; ``by`` None sends each row straight to every rank."""
    found = {"MAGI_ATTENTION_KERNEL_BACKEND": "sdpa", "MAGI_ATTENTION_NATIVE_GRPCOLL": "0"}
    if by is not None:
        found |= {"MAGI_ATTENTION_HIERARCHICAL_COMM": "1", "MAGI_ATTENTION_NODE_TRANSPORT": by}
        found["MAGI_ATTENTION_NODE_SIZE"] = ",".join(map(str, sizes))
    return found


def attention(t, plan, tensors, dtype=torch.float32):
    """out, dq, dk and dv of all tokens."""
    q, k, v, dout = (plan.shard(x.to(dtype), t).detach().requires_grad_() for x in tensors)
    out, _ = attend(q, k, v, plan, t)
    out.backward(dout.detach())
    return [plan.gather(x.detach(), t) for x in (out, q.grad, k.grad, v.grad)]


CASES = [
    *(((2, 2), degree, dtype) for degree, dtype in ((0, "float32"), (2, "float32"), (2, "bfloat16"), (1, "float16"))),
    *((sizes, 2, "float32") for sizes in ((2, 2, 2, 2), (3, 1), (1, 2, 2))),
]


@pytest.mark.parametrize("sizes, degree, dtype", CASES)
def test_attention_against_all_to_all_v_and_float64(library, tmp_path, monkeypatch, sizes, degree, dtype) -> None:
    world, dtype = sum(sizes), getattr(torch, dtype)
    results, calls = {}, {}
    for by in (None, "all_to_all", "nvshmem"):
        plan, mask, tensors = problem(31 + world + degree, world, degree)
        for name, value in settings(sizes, by).items():
            monkeypatch.setenv(name, value)

        def main(t, by=by, plan=plan, tensors=tensors):
            folder = tmp_path / f"{by}"
            folder.mkdir(exist_ok=True)
            factory = CpuFactory(library, folder, degree).attach(t)
            found = [attention(t, plan, tensors, dtype) for _ in range(2)]
            assert all(torch.equal(a, b) for a, b in zip(*found)), "the same bits again"
            calls[by] = factory.verbs and factory.verbs.calls
            return found[0]

        results[by] = FakeWorld(world).run(main)[0]
    assert calls[None] is None and calls["all_to_all"] is None
    stages = sum(not idle for idle in plan.stage_is_idle)
    assert calls["nvshmem"]["end"] == 2 * 3 * stages, "two casts and one reduce in each pass"
    wanted = truth(*(x.double() for x in tensors[:3]), mask, tensors[3].double(), DIM**-0.5)
    limit = 2e-5 if dtype == torch.float32 else 6e-2
    for i, want in enumerate((wanted.out, wanted.dq, wanted.dk, wanted.dv)):
        got = results["nvshmem"][i]
        torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
        assert i > 1 or torch.equal(got, results[None][i]), "casts move bits"
        # a carrier's own terms are rounded to 16 bits, too
        assert dtype != torch.float32 or torch.equal(got, results["all_to_all"][i])


# ---- processes ------------------------------------------------------------------------------------------------------
def set_environment(sizes, by) -> None:
    for name in [name for name in os.environ if name.startswith("MAGI_ATTENTION_")]:
        del os.environ[name]
    os.environ.update(settings(sizes, by))


def check_life(library: str, folder: Path, tensors: list[torch.Tensor]) -> None:
    """The memory comes with the first call and goes with the group, though a plan still refers to that."""
    group = dist.new_group()
    factory = CpuFactory(library, folder).attach(as_transport(group))
    found = {}
    for by in ("all_to_all", "auto"):
        set_environment((2, 2), by)
        plan, _, _ = problem(7, 4, 1)
        found[by] = attention(group, plan, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found["auto"], found["all_to_all"]))
    verbs = factory.verbs
    assert verbs.held > 0 and verbs.calls["end"] > 0
    dist.destroy_process_group(group)
    assert (verbs.held, verbs.has_left) == (0, True)


def check_death(rank: int, library: str, folder: Path, tensors: list[torch.Tensor]) -> None:
    """Rank 3 is killed in the reduce of its backward pass."""
    set_environment((2, 2), "nvshmem")
    group = TorchTransport(dist.new_group(), timeout_s=4)
    factory = CpuFactory(library, folder).attach(group)
    plan, _, _ = problem(7, 4, 1)
    attention(group, plan, tensors)

    def before(name: str) -> None:
        if name == "sum":
            os.kill(os.getpid(), signal.SIGKILL)

    factory.verbs.before = before if rank == 3 else factory.verbs.before
    with pytest.raises(PeerFailureError) as info:
        attention(group, plan, tensors)
        attention(group, plan, tensors)
    text = str(info.value)
    assert "Rank 3 (node 1) did not deliver within 4 s" in text, text  # said by this rank or by one that it waits for
    assert "process has ended" in text and "make a new process group" in text, text
    with pytest.raises(PeerFailureError, match="make a new"):
        attention(group, plan, tensors)


def processes(rank: int, world: int, library: str, folder: str) -> None:
    folders = [Path(folder) / name for name in ("life", "death")]
    for path in folders:
        path.mkdir(exist_ok=True)
    tensors = problem(7, 4, 1)[2]
    check_life(library, folders[0], tensors)
    check_death(rank, library, folders[1], tensors)


def test_processes(library, tmp_path) -> None:
    """Over gloo, the last of them with a rank that is killed."""
    with pytest.raises(RankFailure, match=r"(?s)1 of 4 ranks failed.*rank 3 ---\ndied with exit code -9"):
        run_processes(4, processes, library, str(tmp_path), grace_s=DEADLINE_S)
