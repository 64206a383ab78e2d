# SPDX-License-Identifier: Apache-2.0
"""Dispatch that knows which ranks share a node: as balanced as without, no more rows, and fewer between nodes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from plan_oracle import least_work

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.traffic import direct_rows, two_level_rows
from magi_attention.config import DispatchConfig, DistAttnConfig, MinHeapDispatchAlg
from magi_attention.errors import ContractError
from magi_attention.meta.explain import explain_links
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import build_plan, plan_for_partitions
from magi_attention.testing.masks import random_slices


def planned(slices: SliceTable, total: int, world: int, chunk: int, nodes=None, **dispatch) -> Plan:
    config = DistAttnConfig(DispatchConfig(chunk, nodes=nodes, **dispatch))
    return build_plan(slices, total, world, config=config, balance=None if chunk else 1.02)


def random_documents(rng: np.random.Generator, total: int) -> Mask:
    """Documents of about the same length, of very different ones, or a few lengths again and again."""
    kind, mean = int(rng.integers(3)), int(rng.integers(20, max(total // 6, 21)))
    if kind == 0:
        lengths = rng.integers(1, 2 * mean, size=total)
    elif kind == 1:
        lengths = (1 + rng.pareto(1.2, size=total) * mean / 4).astype(np.int64)
    else:
        lengths = np.resize(rng.integers(1, 3 * mean, size=5), total)
    ends = np.cumsum(lengths)
    return Mask.varlen([0, *ends[ends < total].tolist(), total], causal=bool(rng.integers(4)))


def random_mask(rng: np.random.Generator, total: int) -> Mask:
    kind = int(rng.integers(8))
    if kind == 0:
        return Mask.sliding_window(total, (int(rng.integers(1, total // 2)), 0))
    if kind == 1:
        return Mask.from_slices(*_parts(random_slices(rng, total, total, max_slices=12)), total, total)
    if kind == 2:
        return Mask.block_causal([0, total // 3, total], int(rng.integers(5, 60)))
    if kind == 3:
        parents = [-1] + [int(rng.integers(-1, node)) for node in range(1, 40)]
        sizes = np.diff(np.sort(rng.choice(np.arange(1, total), 39, replace=False)), prepend=0, append=total)
        return Mask.prefix_tree(sizes, parents)
    return random_documents(rng, total)


def _parts(slices: np.ndarray) -> tuple[list, list, list]:
    return slices[:, :2].tolist(), slices[:, 2:4].tolist(), slices[:, 4].tolist()


def random_nodes(rng: np.random.Generator, world: int) -> int | tuple[int, ...]:
    """A number of ranks in a node, or nodes of different sizes, maybe of ranks that do not follow one another."""
    if rng.integers(2):
        return int(rng.integers(1, world + 1))
    labels = np.sort(rng.integers(0, max(world // 3, 1) + 1, size=world))
    return tuple((rng.permutation(labels) if rng.integers(3) == 0 else labels).tolist())


def crossing(plan: Plan, nodes: Nodes) -> tuple[int, int]:
    """Rows over the network, straight to every rank and once to each node, from what ranks send one another."""
    specs = [plan.cast_spec(rank, 0) for rank in range(plan.cp_size)]
    return tuple(int(count(specs, nodes).network.sum()) for count in (direct_rows, two_level_rows))


def check_contract(mask: Mask, world: int, chunk: int | None, nodes, uneven: bool = False) -> bool:
    """All that is promised beside the dispatch without nodes; True if it is another one. Without ``chunk`` each chooses
    its own."""
    before, after = (planned(mask.slices, mask.total_q, world, chunk, n, uneven_shard=uneven) for n in (None, nodes))
    assert sorted(c for part in after.partitions for c in part) == list(range(after.num_chunks))
    assert after.nodes == Nodes.of_config(nodes, world) and before.nodes is None
    if (after.chunk_size, after.partitions) == (before.chunk_size, before.partitions):
        return False
    heap = planned(mask.slices, mask.total_q, world, before.chunk_size, alg=MinHeapDispatchAlg(), uneven_shard=uneven)
    assert chunk is None or after.chunk_size == before.chunk_size
    assert uneven or {len(part) for part in after.partitions} == {after.num_chunks // world}
    assert after.areas.max() <= max(int(1.01 * least_work(after)), before.areas.max())
    then, now, most = (plan.comm_matrix().sum(axis=0) for plan in (before, after, heap))
    assert now.sum() <= then.sum() and now.max() <= most.max()
    (straight, once), (straight_now, once_now) = (crossing(plan, after.nodes) for plan in (before, after))
    assert straight_now <= straight and once_now < once
    return True


@pytest.mark.parametrize("seed", range(24))
def test_random_masks_and_nodes(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    world = int(rng.integers(4, 25))
    mask = random_mask(rng, world * 16 * 8)
    check_contract(mask, world, 16, random_nodes(rng, world), uneven=not seed % 5)


@pytest.mark.parametrize("seed", range(12))
def test_chunks_of_its_own(seed: int) -> None:
    """Where the chunk size is open, shorter chunks may be what the ranks of a node can share."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    world = int(rng.integers(8, 33))
    check_contract(random_documents(rng, world * 2048), world, None, int(rng.choice([2, 4, 8])))


def test_long_documents_that_need_short_chunks() -> None:
    lengths = np.resize([15_000, 1_000, 250, 4_500, 600, 350, 2_000], 80)
    ends = np.cumsum(lengths)
    mask = Mask.varlen([0, *ends[ends < 262_144].tolist(), 262_144], causal=False)
    assert check_contract(mask, 64, None, 8)
    plan = planned(mask.slices, mask.total_q, 64, None, 8)
    assert plan.chunk_size < planned(mask.slices, mask.total_q, 64, None).chunk_size


@pytest.mark.parametrize("seed", range(8))
def test_documents_cross_less(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    world, node = 32, int(rng.choice([4, 8]))
    cuts = np.sort(rng.choice(np.arange(1, world * 1024), world * 2, replace=False))
    mask = Mask.varlen([0, *cuts.tolist(), world * 1024], causal=True)
    assert check_contract(mask, world, 64, node)
    before, after = (planned(mask.slices, mask.total_q, world, 64, n) for n in (None, node))
    assert crossing(after, after.nodes)[1] < 0.6 * crossing(before, after.nodes)[1]


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_and_any_label_gives_the_same(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    mask = random_documents(rng, 16 * 512)
    plan = planned(mask.slices, mask.total_q, 16, 32, 4)
    labels = [7, 3, 9, 1]  # that tell nodes apart, whatever they are
    again = planned(SliceTable(mask.slices.array.copy()), mask.total_q, 16, 32, [labels[r // 4] for r in range(16)])
    copy = pickle.loads(pickle.dumps(plan))
    for other in (again, copy):
        assert other == plan and other.partitions == plan.partitions and other.nodes == plan.nodes


def test_without_another_node_nothing_changes() -> None:
    mask = random_documents(np.random.default_rng(1), 4096)
    plain = planned(mask.slices, 4096, 8, 32)
    for nodes in (8, 99, 1, (4,) * 8, tuple(range(8))):
        assert planned(mask.slices, 4096, 8, 32, nodes).partitions == plain.partitions
    heap = [planned(mask.slices, 4096, 8, 32, n, alg=MinHeapDispatchAlg()).partitions for n in (None, 4)]
    assert heap[0] == heap[1]


def test_fewer_chunks_than_a_node_has_ranks() -> None:
    for tokens, world, node in ((5, 8, 4), (64, 16, 8), (1, 4, 2)):
        check_contract(Mask.causal(tokens), world, 4, node)
        check_contract(Mask.varlen(sorted({0, tokens // 2, tokens}), causal=True), world, 1, node)


def test_nodes_are_a_part_of_the_plan() -> None:
    mask = random_documents(np.random.default_rng(2), 4096)
    plan, other = (planned(mask.slices, 4096, 8, 32, nodes) for nodes in (4, 2))
    given = plan_for_partitions(mask.slices, 4096, 0, 32, plan.partitions, nodes=plan.nodes)
    assert given == plan and given.nodes.members == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert plan_for_partitions(mask.slices, 4096, 0, 32, plan.partitions) != plan != other
    assert explain_links(plan)["nodes"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ContractError, match="nodes=8"):
        explain_links(planned(mask.slices, 4096, 8, 32))


def test_nodes_that_do_not_fit() -> None:
    slices = Mask.causal(64).slices
    with pytest.raises(ContractError, match="3 ranks, but there are 4"):
        planned(slices, 64, 4, 4, (0, 0, 1))
    for nodes in (0, -1, 2.0, (0, 1.5), True):
        with pytest.raises(ContractError, match="nodes"):
            DispatchConfig(nodes=nodes)
