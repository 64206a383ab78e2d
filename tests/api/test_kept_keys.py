# SPDX-License-Identifier: Apache-2.0
"""How much memory the tables of kept keys take: with a new mask in every step it stays within a limit."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.api import AttnRanges, calc_attn, dist_attn_runtime_dict_mgr, get_position_ids, magi_attn_flex_key
from magi_attention.api.keys.manager import DistAttnRuntimeDict
from magi_attention.common.plan_cache import PlanCache
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, KEPT_ORDERS, Kept, KeptOrder

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from bytes_oracle import reached_bytes  # noqa: E402

TOTAL = 4096


@pytest.fixture
def limit_of(group, monkeypatch):
    """Sets the limit of the group's keys, in MiB, and forgets the keys."""

    def set_limit(mib: int) -> None:
        monkeypatch.setenv("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_MIB", str(mib))
        dist_attn_runtime_dict_mgr._dicts.clear()

    yield set_limit
    dist_attn_runtime_dict_mgr._dicts.clear()


def new_mask(group: dist.ProcessGroup, seed: int):
    """A key of packed documents, used as in a step."""
    rng = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate([[0, TOTAL], rng.integers(1, TOTAL, 40)])).tolist()
    documents = AttnRanges.from_ranges([[a, b] for a, b in zip(cuts, cuts[1:])])
    key = magi_attn_flex_key(
        documents, documents, "causal", TOTAL, TOTAL, num_heads_q=1, num_heads_kv=1, head_dim=8, pad_size=0,
        cp_group_or_mesh=group,
    )  # fmt: skip
    get_position_ids(key)
    manager = dist_attn_runtime_dict_mgr.get(key)
    # What a GPU backend keeps with the slices.
    plan, order = torch.zeros(100_000, dtype=torch.int32), torch.zeros(1000, dtype=torch.uint8)
    orders, cache = PlanCache(), manager.dist_attn_runtime.part.host.cache
    orders.get(KEPT_ORDERS, ("key",), lambda: KeptOrder(order, 0))
    cache.include(orders)
    cache.get(DEVICE_PLANS, ("forward",), lambda: Kept(plan, 0, orders))
    return key, weakref.ref(manager)


def test_tables_of_old_keys_go(group, limit_of):
    limit_of(4)
    managers = []
    gc.disable()
    try:
        for seed in range(30):
            key, manager = new_mask(group, seed)
            managers.append(manager)
            del key
            alive = [m() for m in managers if m() is not None]
            assert alive[-1] is manager(), "the newest one stays"
            del alive
    finally:
        gc.enable()
    # Each has 401,000 bytes in plans, and positions: nine are 4 MiB, and one more is not weighed yet.
    kept = len(dist_attn_runtime_dict_mgr.keys(group))
    assert 8 <= kept <= 11 and [m() is not None for m in managers] == [False] * (30 - kept) + [True] * kept
    assert sum(m().nbytes for m in managers[-kept:-1]) <= 4 * 2**20
    for manager in managers[-kept:]:
        runtime = manager().dist_attn_runtime
        assert manager().nbytes == reached_bytes(manager()) > 401_000
        assert runtime.part.host.cache.nbytes >= 401_000 and runtime.plan is manager().plan


@pytest.mark.parametrize("mib, kept", ((0, 12), (512, 12), (1, 4)))
def test_the_limit_is_in_the_environment(group, limit_of, mib, kept):
    limit_of(mib)
    for seed in range(12):
        new_mask(group, seed)
    assert len(dist_attn_runtime_dict_mgr.keys(group)) == kept


def test_held_keys_work_when_they_are_no_longer_kept(group, limit_of):
    limit_of(1)
    first, manager = new_mask(group, 0)
    for seed in range(1, 10):
        new_mask(group, seed)
    assert first not in dist_attn_runtime_dict_mgr.keys(group) and manager() is not None
    manager().dist_attn_runtime.part.host.cache.clear()
    q = torch.randn(TOTAL, 1, 8)
    assert calc_attn(q, q, q, first)[0].shape == q.shape


def test_use_counts_and_the_newest_stays():
    kept = DistAttnRuntimeDict(100, max_bytes=1500)
    for name in "abcdef":
        kept[name] = SimpleNamespace(nbytes=300)
        kept.get("a")
    assert list(kept) == ["b", "c", "d", "e", "f", "a"]  # the last one is not weighed yet
    kept["big"] = SimpleNamespace(nbytes=5000)
    assert list(kept) == ["c", "d", "e", "f", "a", "big"]
    kept["next"] = SimpleNamespace(nbytes=1)
    assert list(kept) == ["f", "a", "big", "next"]  # four stay, whatever they weigh
    assert sum(kept._bytes.values()) == 5600 and not DistAttnRuntimeDict(2)._bytes
