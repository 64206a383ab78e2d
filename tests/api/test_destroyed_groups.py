# SPDX-License-Identifier: Apache-2.0
"""A process group that was destroyed goes, with its threads and file handles, though keys were made for it."""

from __future__ import annotations

import gc
import os
import weakref

import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.api.keys.manager import DistAttnRuntimeDictManager
from magi_attention.testing.spawn import run_processes

TOTAL = 32


def use(group) -> api.DistAttnRuntimeKey:
    cu = torch.tensor([0, 12, TOTAL], dtype=torch.int32)
    key = api.magi_attn_varlen_key(cu, cu, 2, 2, 16, 0, group, causal=True)
    x = api.dispatch(torch.ones(TOTAL, 2, 16), key)
    api.undispatch(api.calc_attn(x, x, x, key)[0], key)
    return key


def num_open() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def main(rank: int, world: int) -> None:
    others = dist.new_group()
    kept_key = use(others)
    opened = []
    for _ in range(4):
        group = dist.new_group()
        use(group)
        known = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        opened.append(num_open())
        assert known() is None
    assert opened[1:] == opened[:-1], opened
    assert api.get_most_recent_key(others) is kept_key, "keys of a group that lives stay"
    use(others)


def test_keys_keep_no_destroyed_group() -> None:
    run_processes(2, main)


def test_a_cache_of_its_own_goes_first() -> None:
    """The end of a group finds no cache that is gone."""
    run_processes(1, own_cache)


def own_cache(rank: int, world: int) -> None:
    group = dist.new_group()
    key = use(group)
    caches = DistAttnRuntimeDictManager()
    caches[key] = key._manager[0]
    del caches
    gc.collect()
    dist.destroy_process_group(group)
