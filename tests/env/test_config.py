# SPDX-License-Identifier: Apache-2.0
"""Configuration classes: defaults, checks, legacy keywords, value semantics."""

import dataclasses
import pickle

import numpy as np
import pytest

from magi_attention import config as c
from magi_attention.common.enum import AttnOverlapMode, DispatchAlgType, OverlapAlgType
from magi_attention.errors import ContractError

# class: type, optimal, partitions, equal counts, affinity
ALGORITHMS = [
    (c.LBDispatchAlg, DispatchAlgType.LOWER_BOUND, 0, 0, 0, 0),
    (c.DPDispatchAlg, DispatchAlgType.DYNAMIC_PROGRAMMING, 1, 0, 0, 0),
    (c.BSDispatchAlg, DispatchAlgType.BINARY_SEARCH, 1, 1, 0, 0),
    (c.BTPDispatchAlg, DispatchAlgType.BACKTRACKING_PRUNING, 1, 1, 1, 0),
    (c.MinHeapDispatchAlg, DispatchAlgType.MIN_HEAP, 0, 1, 0, 0),
    (c.ToppHeapDispatchAlg, DispatchAlgType.TOPP_HEAP, 0, 1, 1, 1),
    (c.BatchToppHeapDispatchAlg, DispatchAlgType.BATCH_TOPP_HEAP, 0, 1, 1, 1),
    (c.RandomSelectDispatchAlg, DispatchAlgType.RANDOM_SELECT, 0, 1, 1, 0),
    (c.SequentialDispatchAlg, DispatchAlgType.SEQUENTIAL_SELECT, 0, 1, 0, 0),
    (c.SortedSequentialSelectAlg, DispatchAlgType.SORTED_SEQUENTIAL_SELECT, 0, 1, 1, 0),
]


@pytest.mark.parametrize("cls, kind, optimal, partitions, equal, affinity", ALGORITHMS)
def test_dispatch_algorithms(cls, kind, optimal, partitions, equal, affinity):
    alg = cls()
    assert alg.type is kind and isinstance(alg, c.DispatchAlg)
    flags = (
        alg.is_optimal,
        alg.is_partitions_returned,
        alg.is_equal_num_workloads,
        alg.is_affinity_considered,
    )
    assert flags == tuple(map(bool, (optimal, partitions, equal, affinity)))
    assert pickle.loads(pickle.dumps(alg)) == alg and hash(alg) == hash(cls())
    with pytest.raises(dataclasses.FrozenInstanceError):
        alg.top_p = 1


def test_different_algorithms_differ():
    algs = [row[0]() for row in ALGORITHMS]
    assert all((a == b) == (i == j) for i, a in enumerate(algs) for j, b in enumerate(algs))
    assert c.ToppHeapDispatchAlg(top_p=0.5) != c.ToppHeapDispatchAlg()


@pytest.mark.parametrize(
    "make",
    [
        lambda: c.ToppHeapDispatchAlg(top_p=1.5),
        lambda: c.ToppHeapDispatchAlg(top_p=float("nan")),
        lambda: c.BatchToppHeapDispatchAlg(num_of_select_chunk=0),
        lambda: c.SortedSequentialSelectAlg(allocation_ratio=-0.1),
        lambda: c.DispatchAlg(),
        lambda: c.OverlapAlg(),
        lambda: c.DispatchConfig(chunk_size=0),
        lambda: c.DispatchConfig(chunk_size=1.5),
        lambda: c.DispatchConfig(alg="min_heap"),
        lambda: c.DispatchConfig(uneven_shard=True, alg=c.BTPDispatchAlg()),
        lambda: c.OverlapConfig(min_chunk_size=0),
        lambda: c.OverlapConfig(max_num_chunks=-1),
        lambda: c.OverlapConfig(dynamic_max_degree=0),
        lambda: c.OverlapConfig(calc_cost_factor=0),
        lambda: c.OverlapConfig(comm_cost_factor=float("nan")),
        lambda: c.OverlapConfig(degree=-1),
        lambda: c.OverlapConfig(degree=65),
        lambda: c.OverlapConfig(degree=None),
        lambda: c.OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=2),
        lambda: c.OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=0),
        lambda: c.OverlapConfig(mode="sometimes"),
        lambda: c.OverlapConfig(alg=c.MinHeapDispatchAlg()),
        lambda: c.GrpCollConfig(num_sms=23),
        lambda: c.GrpCollConfig(num_nvl_bytes=-1),
        lambda: c.DistAttnConfig(c.OverlapConfig()),
    ],
)
def test_mistakes_are_contract_errors(make):
    with pytest.raises(ContractError, match=r"\.$") as error:
        make()
    assert isinstance(error.value, AssertionError) and isinstance(error.value, ValueError)


def test_dispatch_config():
    assert c.DispatchConfig() == c.DispatchConfig(None, False, c.LocalityDispatchAlg())
    assert c.DispatchConfig(chunk_size=np.int64(4)).chunk_size == 4
    for alg in (c.BSDispatchAlg(), c.MinHeapDispatchAlg(), c.SequentialDispatchAlg()):
        assert c.DispatchConfig(uneven_shard=True, alg=alg).alg is alg


def test_overlap_config_default():
    config = c.OverlapConfig()
    assert config.mode is AttnOverlapMode.STATIC and config.degree == 1
    assert (config.dynamic_max_degree, config.min_chunk_size, config.max_num_chunks) == (8, 512, 64)
    assert config.alg == c.UniformOverlapAlg(random_costs=False, random_seed=None)
    assert config.alg.type is OverlapAlgType.UNIFORM and c.GreedyOverlapAlg().type is OverlapAlgType.GREEDY
    assert config.calc_cost_factor == config.comm_cost_factor == 1.0
    assert config.enable and not config.no_overlap


def test_overlap_off():
    off = c.OverlapConfig(degree=0)
    assert off.no_overlap and not off.enable
    assert off == c.OverlapConfig(enable=False) == c.OverlapConfig(mode=AttnOverlapMode.DYNAMIC, enable=False)
    assert c.OverlapConfig(enable=True, degree=3) == c.OverlapConfig(degree=3)
    with pytest.raises(AttributeError):
        off.enable = True


def test_dynamic_is_honoured():
    dynamic = c.OverlapConfig(mode=AttnOverlapMode.DYNAMIC)
    assert dynamic.mode is AttnOverlapMode.DYNAMIC and dynamic.degree is None and dynamic.enable
    assert dynamic == c.OverlapConfig(mode="dynamic", degree=None)
    assert dataclasses.replace(dynamic, min_chunk_size=4).min_chunk_size == 4
    assert dataclasses.replace(c.OverlapConfig(), mode=AttnOverlapMode.DYNAMIC) == dynamic


def test_values_are_hashable_picklable_comparable():
    config = c.DistAttnConfig(
        dispatch_config=c.DispatchConfig(chunk_size=512, alg=c.ToppHeapDispatchAlg(0.5)),
        overlap_config=c.OverlapConfig(degree=4, alg=c.UniformOverlapAlg(True, 42)),
    )
    again = pickle.loads(pickle.dumps(config))
    assert again == config and hash(again) == hash(config) and config != c.DistAttnConfig()
    assert dataclasses.replace(config, overlap_config=c.OverlapConfig()).overlap_config.degree == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.overlap_config = None


def test_retired_keywords_warn_and_do_nothing():
    with pytest.warns(DeprecationWarning, match="2-D device mesh"):
        assert c.DistAttnConfig(high_bandwith_domain_size=8) == c.DistAttnConfig()
    with pytest.warns(DeprecationWarning, match="DETERMINISTIC_MODE"):
        assert c.DistAttnConfig(deterministic=True) == c.DistAttnConfig()


def test_grpcoll_defaults_and_buffer_args():
    config = c.GrpCollConfig()
    assert dataclasses.astuple(config) == (24, 8, 256, 16, 128, 2_000_000_000, 0)
    assert dataclasses.astuple(config.to_kernel_config()) == (24, 8, 256, 16, 128)
    assert config.to_buffer_args() == {
        "num_nvl_bytes": 2_000_000_000,
        "num_rdma_bytes": 0,
        "num_qps_per_rank": 1,
        "low_latency_mode": False,
        "explicitly_destroy": True,
    }
    assert c.GrpCollConfig(num_rdma_bytes=1).to_buffer_args()["num_qps_per_rank"] == 24
    cast = c.GrpCollConfig.get_default_group_cast_config(16)
    assert dataclasses.astuple(cast)[:5] == (24, 36, 288, 20, 128)
    reduce = c.GrpCollConfig.get_default_group_reduce_config(160)
    assert dataclasses.astuple(reduce)[:5] == (24, 2, 720, 8, 128)
    with pytest.raises(ContractError, match="7 ranks"):
        c.GrpCollConfig.get_default_group_cast_config(7)


def test_least_bytes_intranode():
    """2 channels, 2 ranks, 8 tokens, 16 half-precision elements: every term by hand."""
    get = c.GrpCollConfig.get_min_num_bytes_intranode
    plain = 4 * 4 + 16 * 4 + 2 * 2 * 8 * 16 * 2 + 4 * 2 * 2 * 8 + 16
    args = (4, 2, 16, 8, np.dtype("float16"))
    assert get(*args, alignment=1) == plain
    assert get(*args) == -(-plain // 128) * 128
    assert get(*args, transfer_lse=True, num_heads=4, alignment=1) == plain + 4 * 2 * 2 * 8 * 4
    assert get(*args, num_groups=3, alignment=1) == plain + 2 * (2 * 2 * 8 * 16 * 2 + 16)
    with pytest.raises(ContractError):
        get(*args, transfer_lse=True)
    with pytest.raises(ContractError):
        get(*args, transfer_lse=True, num_heads=5)
    with pytest.raises(ContractError):
        get(3, 2, 16, 8, np.dtype("float16"))


def test_least_bytes_internode():
    get = c.GrpCollConfig.get_min_num_bytes_internode
    # channels 2, Rr 3, Rn 4; token: align16(32 + 8) = 48
    rdma, nvl = get(4, 3, 4, 16, 5, 6, np.dtype("float16"), alignment=1)
    assert rdma == 2 * 2 * 3 * 5 * 48 + 4 * 2 * 2 * 3 * (2 * 4 + 4)
    assert nvl == 2 * 4 * 6 * 48 + 4 * 2 * 4 * (2 * 3 + 2)
    single, _ = get(4, 3, 4, 16, 5, 6, np.dtype("float16"), rdma_decoulped=False, alignment=1)
    assert single * 2 == rdma
    aligned = get(4, 3, 4, 16, 5, 6, np.dtype("float16"), transfer_lse=True, num_heads=2, num_groups=2)
    token = 48 + 32  # align16(32 + 4 * 2 + 8), one more tensor
    assert aligned[1] == -(-(2 * 4 * 6 * token + 4 * 2 * 4 * 8) // 128) * 128
