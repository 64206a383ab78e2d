# SPDX-License-Identifier: Apache-2.0
"""Plans that are made ahead: in a thread, in a worker process of a data loader, and through a pickle."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from magi_attention.api import AttnPolicy, Mask, OverlapConfig, attend, kernel_tiles, make_plan, plan_async
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.common.slices import SliceTable
from magi_attention.config import DistAttnConfig
from magi_attention.errors import ContractError
from magi_attention.functional import ahead
from magi_attention.functional.ahead import AHEAD, _calls, prepare
from magi_attention.functional.one_launch.nvlink import FusedAttention
from magi_attention.kernels import Registry
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.ahead import KernelTiles
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import PlanShape, table_plan
from magi_attention.kernels.types import AttnOptions
from magi_attention.meta import plan as meta_plan
from magi_attention.meta.one_launch.fused_layout import FusedLayout
from magi_attention.native.ffa import FfaTile, ForwardTiles
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing.masks import random_slices
from magi_attention.testing.spawn import run_processes

SHAPE = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 128}
TILE = FfaTile(128, 2, 1)
KERNELS = KernelTiles(ForwardTiles(TILE), TILE, (4, 2), (128, 128), 132, AttnOptions(0.1))
CASES = {  # overlap degree, query moves, kernels
    "stages": (2, "never", KERNELS),
    "fetched at once": (0, "never", KERNELS),
    "queries move": (1, "always", KERNELS),
    "one launch": (1, "never", KERNELS._replace(is_fused=True)),
    "no kernels": (1, "never", None),
}


def random_mask(seed: int, total: int = 2000) -> Mask:
    rng = np.random.default_rng(seed)
    rows = random_slices(rng, total, total)
    return Mask(SliceTable(rows), total, total)


def refuse(*args, **kwargs):
    raise AssertionError("made anew, though it was made ahead")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_call_wants_travels_with_the_pickle(case, seed, monkeypatch):
    degree, query_moves, kernels = CASES[case]
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=degree))
    made = make_plan(random_mask(seed), 3, config, query_moves=query_moves, **SHAPE)
    rank = seed % 3
    plan = pickle.loads(pickle.dumps(made.prepare(rank, kernels)))
    assert plan == made and plan.nbytes > 0
    assert len(pickle.dumps(plan)) == pytest.approx(len(pickle.dumps(made)), rel=0.01), "it may travel on"

    fresh = make_plan(random_mask(seed), 3, config, query_moves=query_moves, **SHAPE)
    prepare(fresh, rank, None if kernels is None else kernels._replace(is_portable=True))
    for owner, name in (
        (meta_plan.Plan, "_make_rank"), (A2AVLayout, "from_spec"), (FusedLayout, "part"), (TilePlan, "build"),
        (schedule_module, "_choose"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, refuse)
    prepare(plan, rank, kernels)
    ahead = plan.cache.find(AHEAD, rank)
    assert (ahead.fused is not None) == (case == "one launch" and not all(plan.stage_is_idle))
    monkeypatch.undo()
    if kernels is None:
        return
    calls, others = ([*_calls(p, p.rank(rank), p.cache.find(AHEAD, rank))] for p in (plan, fresh))
    assert [call[1:] for call in calls] == [call[1:] for call in others]
    for mine, other in zip(calls, others):
        np.testing.assert_array_equal(mine.slices.array, other.slices.array)
        for is_transposed in (False, True):
            shape = PlanShape(mine.queries, mine.keys, TILE, is_transposed)
            monkeypatch.setattr(TilePlan, "build", refuse)
            words = table_plan(mine.slices, shape, torch.device("cpu"))
            monkeypatch.undo()
            want = TilePlan.of_table(SliceTable(other.slices.array), other.queries, other.keys, 128, 2, is_transposed)
            np.testing.assert_array_equal(words.numpy(), want.words)


def test_a_plan_that_was_not_prepared_is_pickled_without_its_tables():
    plan = make_plan(random_mask(0), 2, **SHAPE)
    size = len(pickle.dumps(plan))
    plan.rank(0), plan.rank(1)
    TilePlan.of_table(plan.rank(0).host, plan.rank(0).num_tokens, plan.rank(0).num_tokens, 128, 2, is_kept=True)
    assert len(pickle.dumps(plan)) == size
    assert len(pickle.dumps(plan.prepare(0, KERNELS))) > size
    plan.cache.clear()
    assert len(pickle.dumps(plan)) == size


def test_attention_in_one_launch_takes_the_layout_made_ahead(monkeypatch):
    plan = make_plan(random_mask(1), 2, **SHAPE).prepare(1, KERNELS._replace(is_fused=True))
    layout = plan.cache.find(AHEAD, 1).fused
    monkeypatch.setattr(FusedLayout, "part", refuse)

    class Transport:
        rank = 1

    assert FusedAttention(plan, Transport(), False).part is layout


def attend_with(plan, total: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    full = [torch.randn(total, heads, 128, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    plan.gather(attend(*(plan.shard(x) for x in full), plan)[0]).square().sum().backward()
    return [x.grad for x in full]


def attend_both(rank: int, world: int, seed: int) -> list[bool]:
    mask = random_mask(seed, 300)
    plans = make_plan(mask, world, **SHAPE), plan_async(mask, world, rank=rank, **SHAPE).result()
    plans += (plans[1].with_mask(mask).prepare(rank),)
    want, *others = [attend_with(plan, 300) for plan in plans]
    warm = pickle.loads(pickle.dumps(plans[1]))
    A2AVLayout.from_spec = meta_plan.Plan._make_rank = refuse  # in this process, which ends here
    others.append(attend_with(warm, 300))
    return [torch.equal(a, b) for other in others for a, b in zip(want, other)]


def test_gradients_are_the_same_bits():
    seed = 5
    print(f"seed {seed}")
    assert all(map(all, run_processes(2, attend_both, seed)))


def collate(items):
    lengths = [len(item) for item in items]
    mask = Mask.varlen(np.cumsum([0, *lengths]).tolist(), causal=True)
    plan = make_plan(mask, 2, **SHAPE).prepare(1, KERNELS)
    # As layers with another mask have it: the same dispatch, prepared too.
    local = plan.with_mask(Mask.varlen(mask.cu_seqlens, window=(16, 0))).prepare(1, KERNELS)
    return torch.cat(items), plan, local


def test_a_worker_of_a_data_loader_makes_plans(monkeypatch):
    documents = [torch.arange(100 + 10 * i) for i in range(6)]
    # Not by fork, after which a worker may wait for ever for threads that only this process has.
    loader = DataLoader(
        documents, batch_size=2, collate_fn=collate, num_workers=1, prefetch_factor=1,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    found = list(loader)
    monkeypatch.setattr(TilePlan, "build", refuse)
    monkeypatch.setattr(meta_plan.Plan, "_make_rank", refuse)
    for tokens, plan, local in found:
        assert plan.total_tokens == len(tokens) and plan.partitions == local.partitions
        for p in (plan, local):
            prepare(p, 1, KERNELS)
            assert p.positions(1).shape == (p.rank(1).num_tokens,)


@pytest.mark.parametrize("wrong", [{"rank": 5}, {"rank": 0, "num_heads_q": 3, "num_heads_kv": 2}])
def test_errors_come_with_the_result(wrong):
    future = plan_async(Mask.causal(64), 2, **wrong)
    with pytest.raises((ContractError, IndexError)) as found:
        future.result()
    with pytest.raises(found.type) as want:
        rank = wrong.pop("rank")
        make_plan(Mask.causal(64), 2, **wrong).prepare(rank)
    assert str(found.value) == str(want.value)


def test_a_worker_hands_the_error_on():
    loader = DataLoader([0], collate_fn=lambda items: make_plan(Mask.causal(64), 2).prepare(7), num_workers=1)
    with pytest.raises(IndexError, match="rank 7 is outside 0..1"):
        next(iter(loader))


def test_no_thread_outlives_the_interpreter():
    program = (
        "from magi_attention.api import Mask, plan_async\n"
        "futures = [plan_async(Mask.causal(4096), 4, rank=0) for _ in range(8)]\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


class TilesOfHeads(FfaBackend):
    """Says which heads it was asked for."""

    def __init__(self) -> None:
        pass

    def why_not(self, problem):
        return None if (problem.num_heads_q, problem.num_heads_kv) == (4, 2) else "These are all heads at once."

    def tiles(self, index, dtype, heads, head_dims, options):
        return KernelTiles((), (), heads, head_dims, 1, options, False)


def test_kernel_tiles_are_those_of_a_head_chunk():
    """Each chunk is a call of its own, so tile plans of all heads together would not be found."""
    of_heads = (torch.device("cpu", 0), torch.bfloat16, (8, 4), (64, 64), 0.0, SingleTransport())
    tiles = ahead.kernel_tiles(*of_heads, Registry((TilesOfHeads(),)), AttnPolicy(head_chunks=2))
    assert tiles is not None and tiles.heads == (4, 2)


def test_a_cpu_has_no_kernel_tiles():
    assert kernel_tiles("cpu", torch.float32, **SHAPE) is None
    with pytest.raises(ContractError, match="3 query heads"):
        kernel_tiles("cpu", torch.float32, num_heads_q=3, num_heads_kv=2, head_dim=8)
