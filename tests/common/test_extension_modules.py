# SPDX-License-Identifier: Apache-2.0
"""The Python equivalents of the published extension modules, and the names of magi_attention.common."""

import importlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from magi_attention import common, magi_attn_comm, magi_attn_ext
from magi_attention.common import AttnForwardMeta, AttnRange, AttnRanges
from magi_attention.config import GrpCollConfig
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing.waiting import DEADLINE_S


def test_names_resolve():
    assert common.USE_CPP_BACKEND is False and common.is_cpp_backend_enable() in (True, False)
    assert importlib.import_module("magi_attention.common.range_op").range_gather is common.range_op.range_gather
    meta = AttnForwardMeta(lse=None, max_logits=None)
    meta.lse = 3
    assert meta == AttnForwardMeta(3, None)


def test_common_needs_no_torch():
    code = "import sys; from magi_attention import common, config, env; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


@pytest.mark.parametrize("seed", range(10))
def test_sorting_and_unique(seed):
    rng = np.random.default_rng(seed)
    outer = rng.integers(0, 3, (12, 2))
    outer[:, 1] += outer[:, 0]
    inner, types = rng.integers(0, 9, (12, 2)), rng.integers(0, 4, 12)
    order = magi_attn_ext.argsort_ranges(torch.tensor(outer)).tolist()
    assert order == sorted(range(12), key=lambda i: (*outer[i].tolist(), i))
    a, b, c = magi_attn_ext.reorder_ranges_and_attn_type_maps(*map(torch.tensor, (outer, inner, types)))
    assert a.tolist() == outer[order].tolist() and b.tolist() == inner[order].tolist()
    assert c.tolist() == types[order].tolist()
    unique, starts, count = magi_attn_ext.unique_consecutive_pairs(a)
    assert list(map(tuple, unique.tolist())) == sorted(set(map(tuple, outer.tolist())))
    assert a[starts.long()].tolist() == unique.tolist() and count.tolist() == [len(unique)]
    assert starts.dtype == count.dtype == torch.int32


@pytest.mark.parametrize("seed", range(20))
def test_group_cast_ranges(seed):
    rng = np.random.default_rng(seed)
    wanted = []
    for _ in range(3):
        starts = rng.integers(0, 15, rng.integers(0, 4))
        wanted.append(AttnRanges.from_ranges([(int(s), int(s + rng.integers(0, 5))) for s in starts]))
    split = magi_attn_ext.GroupCastRanges(3, wanted)
    for x in range(20):
        ranks = {rank for rank, ranges in enumerate(wanted) for r in ranges if r.start <= x < r.end}
        hits = [r for r in split if r.start <= x < r.end]
        assert len(hits) <= 1 and (hits[0].rank_set if hits else set()) == ranks
    assert [r.start for r in split] == sorted(r.start for r in split)
    whole = magi_attn_ext.GroupCastRanges(3, wanted, split=False)
    assert len(whole) == sum(not r.is_empty() for ranges in wanted for r in ranges)
    with pytest.raises(ContractError):
        magi_attn_ext.GroupCastRanges(2, wanted)


def test_range_with_ranks():
    r = magi_attn_ext.AttnRangeWithRank([2, 1], 3, 5)
    assert r.seqlen == 2 and repr(r) == "[3, 5) for [1, 2]" and pickle.loads(pickle.dumps(r)) == r
    assert r != magi_attn_ext.AttnRangeWithRank([1], 3, 5) and isinstance(r, AttnRange)
    expanded = magi_attn_ext.expand_attn_ranges(AttnRanges.from_ranges([(0, 2), (4, 5)]), 10, 2)
    assert expanded.to_naive_ranges() == [(0, 2), (4, 5), (10, 12), (14, 15)]


def test_barrier():
    barrier = magi_attn_ext.KernelBarrier(2)
    with pytest.raises(TimeoutError, match="0 of 2"):
        barrier.synchronize(timeout=0.01)
    threads = [threading.Thread(target=magi_attn_ext.produce, args=(barrier,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    barrier.synchronize(timeout=DEADLINE_S)
    assert barrier.get_value() == 2
    for thread in threads:
        thread.join()
    barrier.reset()
    assert barrier.get_value() == 0


def test_named_events():
    with pytest.raises(ContractError, match="started"):
        magi_attn_ext.stop_event("test")
    magi_attn_ext.start_event("test")
    with pytest.raises(ContractError, match="stopped"):
        magi_attn_ext.elapsed_ms_event("test")
    magi_attn_ext.stop_event("test")
    assert magi_attn_ext.elapsed_ms_event("test") >= 0
    magi_attn_ext.destroy_event("test")
    magi_attn_ext.destroy_event("test")
    with pytest.raises(ContractError):
        magi_attn_ext.elapsed_ms_event("test")


def test_what_is_not_here_says_so():
    for name in ("compute_sparse_load_metadata", "binary_greedy_parallel_solve", "cut_host_remote_buckets"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(magi_attn_ext, name)()
    with pytest.raises(UnsupportedError, match="NATIVE_GRPCOLL"):
        magi_attn_comm.Buffer(None, 1, 2)
    assert isinstance(GrpCollConfig().to_kernel_config(), magi_attn_comm.Config)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError):
            magi_attn_comm.EventHandle()
