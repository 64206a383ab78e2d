# SPDX-License-Identifier: Apache-2.0
"""Fragments of ranks: against a walk over single tokens, for random documents and dispatches; and at most so many."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from magi_attention.api import (
    AttnMaskType,
    AttnRanges,
    DispatchConfig,
    DistAttnConfig,
    Mask,
    MinHeapDispatchAlg,
    SequentialDispatchAlg,
    make_plan,
)
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.meta import make_dispatch_meta_from_qk_ranges
from magi_attention.meta.fragments import Fragments
from magi_attention.testing.masks import random_slices
from magi_attention.testing.random_plans import random_documents, random_plan


def document_of(plan) -> list[int]:
    """The document of each token; -1 for pad rows."""
    cu = plan.cu_seqlens
    return [sum(token >= end for end in cu[1:]) for token in range(plan.total_tokens)] + [-1] * plan.pad_size


@pytest.mark.parametrize("seed", range(60))
def test_fragments_are_those_of_a_walk_over_tokens(seed: int) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(seed))
    found, document = plan.fragments(), document_of(plan)
    at: dict[int, tuple[int, int]] = {}  # rank and number of the fragment of each token
    for rank in range(plan.cp_size):
        positions = plan.position_array(rank).tolist()
        rows, cuts, previous = [], [], None
        for row, token in enumerate(positions):
            begins = previous is None or token != previous + 1
            rows += [[token, token]] * begins
            rows[-1] = [rows[-1][0], token + 1]
            at[token] = rank, len(rows) - 1
            cuts += [row] * (begins or document[token] != document[token - 1])
            previous = token
        assert found.ranges[rank].tolist() == rows
        assert found.segments(rank).tolist() == [*cuts, len(positions)]
        of_fragment = [[s for s, row in enumerate(cuts) if at[positions[row]][1] == f] for f in range(len(rows))]
        assert found.first_segments(rank).tolist() == [segments[0] for segments in of_fragment]
        assert found.last_segments(rank).tolist() == [segments[-1] for segments in of_fragment]
    passes = [
        (*at[token - 1], *at[token])
        for token in range(1, plan.total_tokens)
        if document[token] == document[token - 1] and at[token] != at[token - 1]
    ]
    assert [tuple(row) for row in found.passes.tolist()] == passes
    givers, takers = {p[:2] for p in passes}, {p[2:] for p in passes}
    for rank in range(plan.cp_size):
        for number, (begin, end) in enumerate(found.ranges[rank].tolist()):
            gives, takes = (rank, number) in givers, (rank, number) in takers
            assert found.gives(rank)[number] == gives and found.takes(rank)[number] == takes
            assert found.carries(rank)[number] == (gives and takes and document[begin] == document[end])
    assert found.most == max(number for _, number in at.values()) + 1


def test_it_is_a_value() -> None:
    plan = make_plan(Mask.varlen([0, 5, 40], causal=True), 4, DistAttnConfig(DispatchConfig(chunk_size=3)))
    found = plan.fragments()
    again = pickle.loads(pickle.dumps(found))
    assert again == found == plan.fragments() and hash(again) == hash(found)
    assert plan.fragments([0, 5, 40]) == found != plan.fragments([0, 40])
    assert found != Fragments(found.ranges[:-1], found.cu_seqlens) and found != "fragments"
    assert plan.with_mask(Mask.causal(40)).fragments() == plan.fragments([0, 40])


def test_unknown_documents_are_asked_for() -> None:
    slices = Mask.from_slices([[0, 12]], [[0, 12]], [1], 12)
    with pytest.raises(ContractError, match="does not know its documents"):
        make_plan(slices, 2).fragments()
    assert make_plan(slices, 2).fragments([0, 12]).cu_seqlens.tolist() == [0, 12]


def some_mask(rng: np.random.Generator, total: int) -> Mask:
    if rng.random() < 0.3:
        return Mask(SliceTable(random_slices(rng, total, total, max_slices=8)), total, total)
    return Mask.varlen(random_documents(rng, total), causal=rng.random() < 0.7)


@pytest.mark.parametrize("seed", range(40))
def test_no_rank_holds_more_fragments_than_allowed(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    total, world, most = int(rng.integers(20, 700)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    alg = [{}, {"alg": MinHeapDispatchAlg()}, {"alg": SequentialDispatchAlg()}][seed % 3]
    chunk, uneven = (None, int(rng.integers(1, 9)))[seed % 2], bool(rng.integers(2))
    mask = some_mask(rng, total)
    config = DispatchConfig(chunk, uneven, max_fragments=most, nodes=2 if world % 2 == 0 else None, **alg)
    moves = "always" if world > 1 and not seed % 5 else "never"
    plan = make_plan(mask, world, DistAttnConfig(config), query_moves=moves)
    assert plan.fragments([0, total]).most <= most
    sizes = [len(part) for part in plan.partitions]
    assert sorted(c for part in plan.partitions for c in part) == list(range(plan.num_chunks))
    assert uneven or len(set(sizes)) == 1
    free = make_plan(mask, world, DistAttnConfig(DispatchConfig(chunk, uneven, **alg)))
    if free.fragments([0, total]).most <= most and config.nodes is None and moves == "never":
        assert plan.partitions == free.partitions


def test_published_functions_hold_it_too() -> None:
    """They decide chunk size and pad before the dispatch."""
    ranges = AttnRanges.from_ranges([[0, 300], [300, 1024]])
    for most in (1, 2, 3, 8):
        meta, _ = make_dispatch_meta_from_qk_ranges(
            ranges, ranges, [AttnMaskType.CAUSAL] * 2, 1024, 1024, 16, 4, 0, DispatchConfig(max_fragments=most)
        )
        assert max(1 + int((np.diff(part) > 1).sum()) for part in meta.partitions) <= most


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [4, 8])
def test_few_fragments_stay_balanced(seed: int, most: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    world = (2, 4, 8)[seed % 3]
    total = world * 4096
    cuts = np.unique(rng.integers(1, total, size=(0, 3, 12, 60)[seed % 4]))
    mask = Mask.varlen([0, *cuts.tolist(), total], causal=True)
    plan = make_plan(mask, world, DistAttnConfig(DispatchConfig(max_fragments=most)))
    assert plan.fragments().most <= most and plan.imbalance <= 1.05


@pytest.mark.parametrize("seed", range(40))
def test_one_long_document_among_short_ones(seed: int) -> None:
    """No rank has more than its share, what whole chunks cost and 0.2% for each time that ranks are halved."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    world, chunk = int(rng.integers(2, 33)), 16
    total = world * chunk * int(rng.integers(16, 40))
    length = int(total * rng.uniform(0.05, 0.5))
    begin = int(rng.integers(total - length))
    short = rng.integers(1, total, size=total // 40)
    cuts = np.unique([*short[(short < begin) | (short > begin + length)], max(begin, 1), begin + length])
    mask = Mask.varlen([0, *cuts.tolist(), total], causal=True)
    halvings = int(np.ceil(np.log2(world)))
    config = DispatchConfig(chunk, max_fragments=halvings + 2)
    plan = make_plan(mask, world, DistAttnConfig(config))
    assert plan.fragments().most <= halvings + 2
    assert {len(part) for part in plan.partitions} == {plan.num_chunks // world}
    share = mask.area / world
    assert max(plan.areas) <= max(1.01, 1.002**halvings) * share + chunk * length


def test_a_causal_sequence_in_two_fragments_is_zigzag() -> None:
    config = DistAttnConfig(DispatchConfig(max_fragments=2))
    plan = make_plan(Mask.causal(8 * 1024), 4, config)
    ranges = [ranges.tolist() for ranges in plan.fragments().ranges]
    assert sorted(ranges) == [[[1024 * r, 1024 * (r + 1)], [1024 * (7 - r), 1024 * (8 - r)]] for r in range(3)] + [
        [[3 * 1024, 5 * 1024]]
    ]
    with pytest.raises(ContractError, match="max_fragments"):
        DispatchConfig(max_fragments=0)
