# SPDX-License-Identifier: Apache-2.0
"""Packs for data-parallel groups: each document once, room, equal work, the same on all ranks, and resuming."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from magi_attention.api import Mask, ModelShape
from magi_attention.common.slices import to_dense
from magi_attention.errors import ContractError
from magi_attention.integrations.balanced_packs import BalancedPackSampler, PackedDataset
from magi_attention.integrations.packing import PackingCollator

ROOM = 64


def long_tailed(rng: random.Random, count: int, longest: int) -> list[int]:
    return [min(longest, int(2 * rng.paretovariate(0.9))) for _ in range(count)]


def sampler_of(lengths, ranks=4, rank=0, cp_sizes=(1, 2, 4), **options) -> BalancedPackSampler:
    return BalancedPackSampler(lengths, ROOM, ranks=ranks, rank=rank, cp_sizes=cp_sizes, steps_dealt=4, **options)


def test_each_document_once_and_all_ranks_agree():
    for _ in range(20):
        seed = random.randrange(10**6)
        print(f"seed {seed}")
        rng = random.Random(seed)
        cp_sizes = rng.choice([(1,), (2,), (1, 2), (1, 2, 4), (4,), (1, 4)])
        ranks = cp_sizes[-1] * rng.choice([1, 2, 3])
        lengths = long_tailed(rng, rng.randint(1, 300), ROOM * cp_sizes[-1])
        samplers = [sampler_of(lengths, ranks, rank, cp_sizes, seed=seed) for rank in range(ranks)]
        by_rank = [list(sampler) for sampler in samplers]
        assert len({len(packs) for packs in by_rank}) == 1, "all ranks take as many steps"
        seen: Counter = Counter()
        for packs in zip(*by_rank):
            rank = 0
            while rank < ranks:
                group = packs[rank : rank + packs[rank].cp_size]
                assert rank % len(group) == 0 and [p.cp_rank for p in group] == list(range(len(group)))
                assert len({(p.indices, p.cp_size, p.work) for p in group}) == 1, "a group has one pack"
                assert 0 < sum(lengths[i] for i in group[0].indices) <= ROOM * len(group)
                seen.update(group[0].indices)
                rank += len(group)
        left = samplers[0].left_out
        assert all(sampler.left_out == left for sampler in samplers) and len(left) < ranks // cp_sizes[-1]
        assert seen + Counter(left) == Counter(range(len(lengths)))


def test_work_is_equal_where_order_is_not():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    lengths = long_tailed(random.Random(seed), 6000, 4 * ROOM)
    for cp_sizes in ((4,), (1, 2, 4)):
        sampler = BalancedPackSampler(lengths, ROOM, ranks=16, rank=0, cp_sizes=cp_sizes, seed=seed)
        excess = []
        for _, groups in sampler.steps():
            loads = [sampler.works[pack].sum() for pack in groups]
            excess.append(max(loads) / np.mean(loads) - 1)
        assert np.mean(excess) < 0.08


def test_resumed_packs_are_those_that_were_left():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    lengths = long_tailed(random.Random(seed), 400, 4 * ROOM)
    whole = sampler_of(lengths, seed=seed)
    first, second = list(whole), list(whole)
    assert first != second, "each epoch has an order of its own"
    taken = sampler_of(lengths, seed=seed)
    iterator = iter(taken)
    given = [next(iterator) for _ in range(5)]
    state, ahead = taken.state_dict(), taken.state_dict(done=3)
    resumed, behind = sampler_of(lengths, seed=seed), sampler_of(lengths, seed=seed)
    resumed.load_state_dict(state)
    behind.load_state_dict(ahead)
    assert given + list(resumed) == first and list(resumed) == second
    assert given[:3] + list(behind) == first
    for other in (sampler_of([*lengths, 1], seed=seed), sampler_of(lengths, seed=seed + 1)):
        with pytest.raises(ContractError, match="other documents or settings"):
            other.load_state_dict(state)


def test_work_is_that_of_the_mask_and_of_tokens():
    shape, lengths = ModelShape(8, 2, 2, 1, 4, 16, 10), [5, 1, 9]

    def window(n: int) -> Mask:
        return Mask.varlen([0, n], window=(2, 0))

    pairs = [to_dense(window(n).slices.array, n, n).sum() for n in lengths]
    assert sampler_of(lengths, mask_of=window).works.tolist() == pairs
    # A block multiplies a token by its matrices, two operations a parameter; a pair takes 2 * (4 + 4) for each head.
    matrices = 8 * 4 * (2 + 1 + 1 + 2) + 3 * 8 * 16
    found = sampler_of(lengths, mask_of=window, shape=shape).works
    np.testing.assert_allclose(found, [p + n * 2 * matrices / (2 * 16) for p, n in zip(pairs, lengths)], rtol=0.05)


class Documents(torch.utils.data.Dataset):
    def __init__(self, lengths: list[int]) -> None:
        self.ids = [list(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i]}


@pytest.mark.parametrize("workers", (0, 2))
def test_batches_of_a_loader_hold_the_documents(workers):
    lengths = long_tailed(random.Random(7), 60, 4 * ROOM)
    data, by_rank, packs = Documents(lengths), [], []
    for rank in range(4):
        sampler = sampler_of(lengths, rank=rank)
        packs.append(list(sampler))
        sampler.set_epoch(0)
        loader = DataLoader(
            PackedDataset(data, PackingCollator()), sampler=sampler, batch_size=None, num_workers=workers
        )
        by_rank.append(list(loader))
    for step, batches in enumerate(zip(*by_rank)):
        for rank, batch in enumerate(batches):
            pack = packs[rank][step]
            assert batch["cp_size"] == pack.cp_size == batch["magi_plans"].full.cp_size
            group = batches[rank - pack.cp_rank :][: pack.cp_size]
            tokens = torch.cat([b["input_ids"][0] for b in group]).unique()
            assert sorted(tokens.tolist()) == sorted(x for i in pack.indices for x in data.ids[i])


@pytest.mark.parametrize(
    ("lengths", "options", "sentence"),
    [
        ([5, 257], {}, "257 tokens, and 4 ranks have room for 256"),
        ([5], {"cp_sizes": (1, 3, 4)}, "divide the next larger one"),
        ([5], {"cp_sizes": (2, 2)}, "divide the next larger one"),
        ([5], {"cp_sizes": ()}, "divide the next larger one"),
        ([5], {"ranks": 6}, "4 of them form a group"),
        ([5], {"rank": 4}, "ranks count from 0"),
        ([], {}, "tokens of each document"),
        ([3, 0], {}, "1 or more"),
    ],
)
def test_refused(lengths, options, sentence):
    with pytest.raises(ContractError, match=sentence):
        sampler_of(lengths, **options)
