# SPDX-License-Identifier: Apache-2.0
"""Causal, 16 tokens, chunks of 2, two ranks: every intermediate value by hand. Then limits and long sequences."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import SliceTable
from magi_attention.compat.metas.builders import DistAttnSolver
from magi_attention.config import (
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    MinHeapDispatchAlg,
    OverlapConfig,
    ToppHeapDispatchAlg,
)
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError, DispatchError
from magi_attention.meta import (
    PlanOptions,
    build_plan,
    make_attn_meta_from_dispatch_meta,
    make_bucket_per_rank_from_qk_ranges,
    make_dispatch_meta_from_qk_ranges,
    make_global_bucket_from_qk_ranges,
)
from magi_attention.meta.chunking import compute_pad_size, resolve_chunk_size
from magi_attention.meta.dispatch import check_partitions
from magi_attention.meta.explain import explain
from magi_attention.meta.predict.cost import CostModel, contiguous_areas, timeline

CAUSAL_16 = Mask.causal(16)
CHUNKS_OF_2 = DistAttnConfig(DispatchConfig(chunk_size=2, alg=MinHeapDispatchAlg()))


def test_plan() -> None:
    plan = build_plan(CAUSAL_16.slices, 16, 2, config=CHUNKS_OF_2, min_chunks_per_rank=4)
    assert plan.chunk_areas.tolist() == [3, 7, 11, 15, 19, 23, 27, 31]
    assert plan.partitions == ((0, 3, 4, 7), (1, 2, 5, 6))
    assert plan.areas.tolist() == [68, 68]
    assert plan.position_array(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert plan.position_array(1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert plan.host_ranges(0).tolist() == [[0, 2], [6, 10], [14, 16]]
    assert plan.host_ranges(1).tolist() == [[2, 6], [10, 14]]
    assert plan.stage_ranges[0][0].tolist() == [[2, 6], [10, 14]]
    assert plan.stage_ranges[1][0].tolist() == [[0, 2], [6, 10]]
    assert plan.comm_matrix().tolist() == [[0, 6], [8, 0]]
    cast = plan.rank(0).stages[0].cast
    assert [(n, d) for n, d in zip(cast.input_splits, cast.dst_indices)] == [(2, (1,)), (4, (1,)), (2, ())]
    assert all(dst == (0,) for dst in plan.rank(1).stages[0].cast.dst_indices)
    # The host stage of rank 0 is one causal slice once neighbours in its buffer are merged.
    assert plan.rank(0).host.array.tolist() == [[0, 8, 0, 8, 1]]


def test_published_builders_say_the_same() -> None:
    ranges = AttnRanges.from_ranges([(0, 16)])
    meta_q, meta_k = make_dispatch_meta_from_qk_ranges(
        ranges, ranges, ["causal"], 16, 16, 2, 2, 1, CHUNKS_OF_2.dispatch_config
    )
    assert meta_q.partitions == meta_k.partitions == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert meta_q.position_ids.tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert [meta_q.partitions_perm_idxs[i] for i in meta_q.partitions_unperm_idxs] == list(range(8))
    bucket = make_global_bucket_from_qk_ranges(ranges, ranges, ["causal"], 8, 2)
    assert bucket.areas == [3, 7, 11, 15, 19, 23, 27, 31] and bucket.area == 136
    per_rank = make_bucket_per_rank_from_qk_ranges(ranges, ranges, ["causal"], meta_q)
    assert [b.area for b in per_rank] == [68, 68]
    comm, calc, solver = make_attn_meta_from_dispatch_meta(
        ranges, ranges, ["causal"], 2, 1, 8, meta_q, meta_k, OverlapConfig(), None
    )
    assert solver.is_solved
    assert comm.num_remote_kv_tokens_per_stage == [6] == calc.seqlen_k_per_remote_stage
    assert calc.local_attn_arg.total_area + calc.remote_attn_args_list[0].total_area == 68
    assert calc.merged_attn_arg.total_area == 68
    cast, reduce = (
        comm.kv_group_collective_args_list[0].to_group_cast_args(),
        comm.kv_group_collective_args_list[0].to_group_reduce_args(),
    )
    assert cast["input_split_sizes"] == reduce["output_split_sizes"]
    assert cast["dst_indices"] == reduce["src_indices"]


@pytest.mark.parametrize(
    ("total", "cp", "chunk", "pad"),
    [
        (1024, 6, 208, 224),
        (10244, 8, 451, 580),
        (3840, 10, 128, 0),
        (42817, 12, 892, 10703),
        (13000, 17, 369, 5819),
        (1789, 2, 900, 11),
    ],
)
def test_pad_sizes(total, cp, chunk, pad) -> None:
    assert compute_pad_size(total, cp, chunk) == pad


def test_chunk_size_is_an_upper_bound() -> None:
    assert resolve_chunk_size(4096, 4, None, 8) == 128
    assert resolve_chunk_size(4096, 4, 4096, 8) == 128
    assert resolve_chunk_size(4096, 4, 64, 8) == 64


def test_split_alignment() -> None:
    assert DistAttnSolver.calc_split_alignment(512, 8, 128) == 4
    assert DistAttnSolver.calc_split_alignment(512, 8, 128, strategy="max") == 8


def test_bad_plans_say_what_to_do() -> None:
    slices = CAUSAL_16.slices
    with pytest.raises(AssertionError, match="beyond"):
        build_plan(slices, 8, 2)
    with pytest.raises(ContractError, match="multiple"):
        build_plan(slices, 16, 2, PlanOptions(3, 2))
    with pytest.raises(ContractError, match="at least one"):
        build_plan(SliceTable(np.zeros((0, 5))), 0, 1)
    with pytest.raises(AssertionError, match="MinHeapDispatchAlg"):
        build_plan(slices, 16, 2, config=DistAttnConfig(DispatchConfig(2, alg=DPDispatchAlg())))
    with pytest.raises(AssertionError, match="uneven"):
        build_plan(slices, 16, 2, config=DistAttnConfig(DispatchConfig(3, True, ToppHeapDispatchAlg())))
    with pytest.raises(RuntimeError, match="no chunk"):
        check_partitions([[0, 1], []], 2, 2)
    with pytest.raises(DispatchError):
        check_partitions([[0, 1], []], 2, 2)


def test_a_mask_that_sees_nothing_still_plans() -> None:
    plan = build_plan(SliceTable(np.zeros((0, 5))), 10, 2)
    assert plan.areas.tolist() == [0, 0]
    assert all(plan.stage_is_idle)
    assert explain(plan)["imbalance"] == 1.0


def test_explanation_and_timeline_add_up() -> None:
    options = PlanOptions(num_heads_q=4, num_heads_kv=2, head_dim=8)
    plan = build_plan(CAUSAL_16.slices, 16, 2, options, config=CHUNKS_OF_2, min_chunks_per_rank=4)
    numbers = explain(plan)
    assert numbers["area"] == 136 and numbers["imbalance"] == 1.0
    assert numbers["imbalance_contiguous"] == 100 / 68
    assert contiguous_areas(plan).tolist() == [36, 100]
    assert numbers["row_bytes"] == 2 * 2 * 8 * 2
    assert sum(numbers["bytes_per_stage"]) == numbers["bytes_total"] == 14 * 64
    assert numbers["ring_bytes"] == 16 * 64
    bars = timeline(plan, CostModel.for_plan(plan, MachineRates()))
    for rank in range(2):
        mine = [b for b in bars if b["rank"] == rank]
        host = next(b for b in mine if b["lane"] == "compute" and b["stage"] == -1)
        stage = next(b for b in mine if b["lane"] == "compute" and b["stage"] == 0)
        fetch = next(b for b in mine if b["lane"] == "comm")
        assert stage["start"] == max(host["end"], fetch["end"])


def packed_documents(total: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(min(rng.lognormal(6.5, 1.2) + 1, total - sum(lengths))))
    return np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize(("total", "cp"), [(131072, 8), (1 << 20, 64)])
def test_long_sequences_are_balanced(total, cp) -> None:
    mask = Mask.varlen(packed_documents(total), causal=True)
    plan = build_plan(mask.slices, total, cp, balance=1.02)
    plan.rank(cp // 2)
    assert plan.areas.max() / plan.areas.mean() < 1.05
