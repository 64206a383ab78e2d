# SPDX-License-Identifier: Apache-2.0
"""``PlanCache``: what is in it is found again, its bytes are those of what it holds, and it goes with its owner."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from magi_attention.common.mask import Mask
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.slices import SliceTable
from magi_attention.testing.waiting import DEADLINE_S

TABLES: Kind = Kind("tables")
OTHERS: Kind = Kind("others", lambda table: [table.words])


class Table:
    """Not an array, so its kind says where its arrays are."""

    def __init__(self, words) -> None:
        self.words, self.unknown = words, np.zeros(1000)


class OnDevice:
    """Stands for a tensor of a GPU."""

    dtype, device = torch.int32, torch.device("cuda", 0)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


arrays = st.builds(
    lambda n, kind: {"array": np.zeros(n), "tensor": torch.zeros(n), "device": OnDevice(8 * n)}[kind],
    st.integers(0, 20), st.sampled_from(("array", "tensor", "device")),
)  # fmt: skip
plain = st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3)
tables = st.recursive(
    arrays | plain,
    lambda some: st.lists(some, max_size=3) | st.tuples(some, some) | st.dictionaries(st.integers(), some, max_size=3),
    max_leaves=6,
)


def leaves(table) -> list:
    if isinstance(table, (list, tuple)):
        return [x for part in table for x in leaves(part)]
    return leaves(list(table.values())) if isinstance(table, dict) else [table]


def sizes(held: list) -> tuple[int, int]:
    """Bytes on the host and on the device."""
    found = [(x.nbytes, isinstance(x, OnDevice)) for x in leaves(held) if hasattr(x, "nbytes")]
    return sum(n for n, on_device in found if not on_device), sum(n for n, on_device in found if on_device)


actions = st.sampled_from(("get", "get", "get", "pop", "count", "clear"))
steps = st.lists(st.tuples(actions, st.integers(0, 2), st.integers(0, 3), tables), max_size=20)


@given(steps=steps)
def test_bytes_are_those_of_what_is_held(steps):
    caches = [PlanCache() for _ in range(3)]
    caches[0].include(caches[1])
    caches[1].include(caches[2])
    held: list[dict] = [{}, {}, {}]
    counted: list[dict] = [{}, {}, {}]
    for what, cache, key, table in steps:
        if what == "get":
            assert caches[cache].get(TABLES, key, lambda table=table: table) is held[cache].setdefault(key, table)
        elif what == "pop":
            assert caches[cache].pop(TABLES, key) is held[cache].pop(key, None)
        elif what == "count":
            caches[cache].count(str(key), table)
            counted[cache][key] = table
        else:
            caches[cache].clear()
            for part in held[cache:]:
                part.clear()
        for i in range(3):
            host, device = sizes([*held[i:], *counted[i:]])
            assert (caches[i].host_bytes, caches[i].device_bytes) == (host, device)
            assert caches[i].nbytes == host + device and len(caches[i]) == len(held[i])
            assert all(caches[i].find(TABLES, key) is table for key, table in held[i].items())
            assert list(map(id, caches[i].values(TABLES))) == list(map(id, held[i].values()))


def test_a_part_counts_once_and_goes_with_its_owner():
    whole, part, shared = PlanCache(), PlanCache(), PlanCache()
    part.count("own", np.zeros(2))
    shared.count("own", np.zeros(1))
    whole.include(part, shared)
    part.include(shared, whole)  # twice, and in a circle
    assert (whole.nbytes, part.nbytes, shared.nbytes) == (24, 24, 8)
    del part
    gc.collect()
    assert whole.nbytes == 8


def test_what_was_made_for_a_mask_goes_with_it():
    slices = Mask.causal(32).slices
    table = slices.cache.get(OTHERS, 0, lambda: Table(np.zeros(1)))
    q_ranges, *_ = slices.tensors()
    died = [weakref.ref(x) for x in (slices, slices.cache, table, q_ranges)]
    gc.disable()
    try:
        del table, q_ranges, slices
        assert not any(ref() for ref in died), "at once, for there is no circle"
    finally:
        gc.enable()


def test_copies_begin_empty():
    slices = SliceTable(Mask.varlen([0, 5, 9, 32]).slices.array)
    mask = Mask(slices, 32, 32)
    tensors = slices.tensors()
    assert len(slices.digest) == 16 and slices.area and len(slices.cache) == 3
    assert slices.cache.host_bytes == slices.array.nbytes + sum(x.nbytes for x in tensors)
    for again in (pickle.loads(pickle.dumps(slices)), copy.copy(slices), copy.deepcopy(slices)):
        assert again == slices and again.cache is not slices.cache
        assert again.cache.nbytes == slices.array.nbytes
    assert pickle.loads(pickle.dumps(mask)).slices.cache.find(TABLES, 0) is None
    assert len(pickle.loads(pickle.dumps(slices.cache))) == 0 == len(copy.deepcopy(slices.cache))


def test_clear_frees_tables_but_not_what_calls_hold():
    slices = Mask.causal(32).slices
    first = slices.tensors()
    died, held = weakref.ref(first[0]), first[1]
    del first
    slices.cache.clear()
    gc.collect()
    assert died() is None and held.numel() and slices.cache.nbytes == slices.array.nbytes
    assert slices.tensors()[1] is not held and torch.equal(slices.tensors()[1], held), "made anew"


def test_two_threads_get_the_same_table():
    cache, barrier, found, faults = PlanCache(), threading.Barrier(2, timeout=DEADLINE_S), [[], []], []

    def make() -> np.ndarray:
        barrier.wait()  # both are here before either has made it
        return np.zeros(4)

    def work(mine: list) -> None:
        try:
            for key in range(50):
                mine.append(cache.get(TABLES, key, make))
                barrier.wait()
        except Exception as error:
            faults.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not faults
    assert len(found[0]) == 50 and all(a is b for a, b in zip(*found))
    assert cache.nbytes == 50 * 32, "the ones that came second do not count"


def test_threads_that_add_and_clear_leave_true_numbers():
    cache, parts, faults = PlanCache(), [PlanCache() for _ in range(2)], []
    cache.include(*parts)

    def work(part: PlanCache) -> None:
        try:
            for i in range(500):
                assert part.get(TABLES, i % 7, lambda: np.zeros(3)).nbytes == 24
                assert cache.nbytes >= 0
                cache.include(PlanCache())
                if i % 50 == 49:
                    cache.clear()
                part.pop(TABLES, i % 5)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not faults
    gc.collect()
    assert cache.nbytes == 24 * sum(map(len, parts))
