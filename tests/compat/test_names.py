# SPDX-License-Identifier: Apache-2.0
"""Small published names do what their users expect of them."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from magi_attention.api.magi_attn_interface import DistAttnRuntimeDictManager
from magi_attention.benchmarking.bench import maybe_dist_sync, nvml_context
from magi_attention.common import AttnRanges
from magi_attention.common.enum import GrpCollBufferName, MagiAttentionKernelBackend
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.collection.calc_meta import FA4AttnArg
from magi_attention.meta.container.rank_entry import HostRankEntry
from magi_attention.meta.container.slice import AttnSlice
from magi_attention.testing import assert_close, dist_common, utils
from magi_attention.testing.precision import H100_TFLOPS_16, H800_NVLINK_BANDWIDTH
from magi_attention.testing.ref_attn import _calc_attn_lse
from magi_attention.utils import get_calc_cost_factor, nvtx
from magi_attention.utils.metaclass import SingletonMeta


def test_lse_of_a_mask_for_all_heads_or_for_each():
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 3, dtype=torch.float64), torch.randn(7, 2, 3, dtype=torch.float64)
    mask = torch.rand(4, 5, 7) < 0.6
    mask[1, 2] = False
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, dim=1)) * 0.4
    want = logits.masked_fill(~mask, -torch.inf).logsumexp(-1).T
    assert torch.allclose(_calc_attn_lse(q, k, mask, softmax_scale=0.4), want)
    assert torch.allclose(_calc_attn_lse(q, k, mask[0], 0.4), logits.masked_fill(~mask[0], -torch.inf).logsumexp(-1).T)


def test_switches_have_both_forms():
    @utils.switch_deterministic_mode_decorator(enable=True)
    def inside():
        return os.environ["MAGI_ATTENTION_DETERMINISTIC_MODE"]

    before = os.environ.get("MAGI_ATTENTION_DETERMINISTIC_MODE")
    assert inside() == "1"
    with utils.switch_deterministic_mode_context(enable=False):
        assert os.environ["MAGI_ATTENTION_DETERMINISTIC_MODE"] == "0"
    assert os.environ.get("MAGI_ATTENTION_DETERMINISTIC_MODE") == before
    with utils.switch_sdpa_backend_context():
        assert os.environ["MAGI_ATTENTION_SDPA_BACKEND"] == "1"


def test_filters_are_where_tests_import_them_from(monkeypatch):
    monkeypatch.setenv(dist_common.TEST_WORLD_SIZE, "2,4")
    assert dist_common.should_run_world_size(4) and not dist_common.should_run_world_size(3)
    assert dist_common.should_run_test_case(world_size=2)
    monkeypatch.setenv(dist_common.TEST_ATTN_CONFIG, "uneven_*, full")
    assert dist_common.should_run_test_case(attn_config={dist_common.NAME: "uneven_10k", "x": 1})
    assert not dist_common.should_run_test_case(attn_config={dist_common.NAME: "fuller"})
    monkeypatch.setenv("MAGI_ATTENTION_TEST_BACKEND", "sdpa")
    assert dist_common.should_run_test_case(backend=MagiAttentionKernelBackend.SDPA)
    assert not dist_common.should_run_test_case(backend=MagiAttentionKernelBackend.SDPA_OL)
    assert_close(torch.ones(3), torch.ones(3))


def test_constants_count_single_units():
    """Microseconds of one pair with one head: FLOP over FLOP/s, not over TFLOP/s."""
    assert get_calc_cost_factor(1, 128, H100_TFLOPS_16, 0.5) == pytest.approx(4 * 128 / 989.5e12 / 0.5 * 1e6)
    assert H800_NVLINK_BANDWIDTH == 200e9


def test_one_instance():
    class Only(metaclass=SingletonMeta):
        def __init__(self, x=0):
            self.x = x

    assert Only(3) is Only(4) and Only().x == 3


def test_entry_of_a_rank():
    def piece(q, k):
        return AttnSlice.from_row([*q, *k, 0], 0)

    a, b, c = piece((0, 2), (0, 3)), piece((2, 4), (0, 5)), piece((0, 1), (5, 6))
    chunks = [AttnRanges.from_ranges([[0, 5]]), AttnRanges.from_ranges([[5, 6]])]
    entry = HostRankEntry(AttnRanges(), AttnRanges(), [a, b, c], [a], AttnRanges(), chunks, [[b], [c]])
    assert entry.get_host_calc_area() == 6
    assert (entry.get_remote_calc_area(), entry.get_remote_calc_area(1)) == (11, 1)
    assert (entry.get_remote_comm_size(), entry.get_remote_comm_size(0)) == (6, 5)
    with pytest.raises(ContractError, match="as many"):
        HostRankEntry(AttnRanges(), AttnRanges(), [], [], AttnRanges(), chunks, [[b]])


def test_what_cannot_be_says_what_to_call(monkeypatch):
    arg = FA4AttnArg(AttnRanges.from_ranges([[0, 1]]), AttnRanges.from_ranges([[0, 1]]), [0])
    with pytest.raises(UnsupportedError, match="fa4_fwd"):
        arg.to_fa4_args(is_bwd=True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnsupportedError, match="pip install"), nvml_context():
        pass


def test_nvml_is_shut_down_after_an_error(monkeypatch):
    calls = []
    fake = types.SimpleNamespace(nvmlInit=lambda: calls.append("init"), nvmlShutdown=lambda: calls.append("shutdown"))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(KeyError), nvml_context():
        raise KeyError
    assert calls == ["init", "shutdown"]


def test_without_a_gpu_or_a_group_nothing_happens():
    maybe_dist_sync()
    nvtx.nvtx_range_push("a")
    nvtx.nvtx_range_pop()


def test_spellings():
    assert GrpCollBufferName.GroupCastDefault.value == "group_cast_default"
    manager = DistAttnRuntimeDictManager(max_size_per_group=2)
    assert manager._dict((0,)).max_size == 2 and DistAttnRuntimeDictManager()._dict((0,)).max_size > 2
