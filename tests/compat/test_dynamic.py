# SPDX-License-Identifier: Apache-2.0
"""The published dynamic solver: each pair once, the same on every rank, and metas that fetch what they compute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from magi_attention.common.enum import DynamicAttnAlgType
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.rectangles import AttnRectangles
from magi_attention.common.slices import areas, to_dense
from magi_attention.errors import ContractError
from magi_attention.meta import algorithms
from magi_attention.meta.solver.dynamic_attn_solver import DynamicAttnSolver
from magi_attention.meta.solver.dynamic_solver_vis import visualize_buckets
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

ALGORITHMS = [getattr(algorithms, name) for name in algorithms.__all__ if name != "DynamicAttnAlgorithm"]
MOST_LOAD = 1.10


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def random_hosts(rng, total: int, world: int, chunk: int) -> list[AttnRanges]:
    """Chunks dealt out at random; a rank may have none."""
    owner = rng.integers(0, world, -(-total // chunk))
    chunks = [(a, min(a + chunk, total)) for a in range(0, total, chunk)]
    return [AttnRanges.from_ranges([c for c, o in zip(chunks, owner) if o == rank]) for rank in range(world)]


def rectangles(array) -> AttnRectangles:
    return AttnRectangles.from_ranges(array[:, :2].tolist(), array[:, 2:4].tolist(), array[:, 4].tolist())


def solved(algorithm, array, hosts_q, hosts_k, heads, groups=1):
    buckets = [AttnRectangles() for _ in hosts_q]
    algorithm.solve(rectangles(array), hosts_q, hosts_k, *heads, groups, buckets)
    return buckets


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1, 3, 4)), st.sampled_from(((1, 1), (8, 2))))
def test_each_pair_once_and_alike_on_every_rank(seed, world, heads):
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    total_q, total_k = int(rng.integers(20, 160)), int(rng.integers(20, 160))
    array = random_slices(rng, total_q, total_k)
    hosts = random_hosts(rng, total_q, world, 16), random_hosts(rng, total_k, world, 20)
    for kind in ALGORITHMS:
        buckets = solved(kind(), array, *hosts, heads)
        times = sum(to_dense(bucket.to_slices(), total_q, total_k).astype(int) for bucket in buckets)
        assert (times == to_dense(array, total_q, total_k)).all(), kind
        assert solved(kind(), array, *hosts, heads) == buckets, kind
        if kind is algorithms.NCQDynamicAttnAlgorithm:
            for bucket, host in zip(buckets, hosts[0]):
                assert bucket.get_qo_ranges_union().intersect_size_with(host) == bucket.total_seqlen_qo()


def test_types_are_those_of_the_enum():
    kinds = [kind().type for kind in ALGORITHMS]
    assert set(kinds) == set(DynamicAttnAlgType) and len(kinds) == len(set(kinds)) == 7


def travels(buckets, hosts, heads) -> int:
    total = 0
    for bucket, host in zip(buckets, hosts):
        for cost, ranges in zip(heads, (bucket.get_qo_ranges_union(), bucket.get_kv_ranges_union())):
            total += cost * (ranges.total_seqlen - ranges.intersect_size_with(host))
    return total


CASES = {
    "causal": [[0, 2048, 0, 2048, 1]],
    "full": [[0, 2048, 0, 2048, 0]],
    "documents": [[a, b, a, b, 1] for a, b in ((0, 300), (300, 900), (900, 1100), (1100, 2048))],
    "window": [[0, 256, 0, 256, 1], [256, 2048, 0, 2048, 3]],
    "one sees all": [*([a, a + 256, a, a + 256, 1] for a in range(0, 1792, 256)), [1792, 2048, 0, 2048, 1]],
}


@pytest.mark.parametrize("name", CASES)
def test_ours_sends_no_more_than_the_published_ones(name):
    """Where a published one keeps to the load, ours does, and sends at most as much."""
    array, world = np.array(CASES[name]), 4
    order = np.random.default_rng(3).permutation(16)
    hosts = [AttnRanges.from_ranges([(128 * c, 128 * c + 128) for c in sorted(order[r::world])]) for r in range(world)]
    for heads in ((4, 4), (16, 2)):
        found = {}
        for kind in ALGORITHMS:
            buckets = solved(kind(), array, hosts, hosts, heads)
            loads = np.array([bucket.area() for bucket in buckets])
            assert loads.sum() == areas(array).sum()
            found[kind] = travels(buckets, hosts, heads), bool(loads.max() <= MOST_LOAD * loads.mean())
        print(name, heads, {kind.__name__: cost for kind, (cost, _) in found.items()})
        ours, is_even = found.pop(algorithms.QueryMovesDynamicAttnAlgorithm)
        assert is_even and all(ours <= cost for cost, was_even in found.values() if was_even)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1, 2, 4)), st.sampled_from(ALGORITHMS))
def test_metas_fetch_what_they_compute(seed, world, kind):
    note(f"seed {seed}, {kind.__name__}")
    rng = np.random.default_rng(seed)
    total = int(rng.integers(20, 120))
    array, hosts = random_slices(rng, total, total), random_hosts(rng, total, world, 16)
    given_ranges = [AttnRanges.from_ranges(array[:, ends].tolist()) for ends in ([0, 1], [2, 3])]
    solvers = []
    for rank in range(world):
        solver = DynamicAttnSolver(
            kind(), 4, 2, 64, None, host_ranges_q=hosts, host_ranges_k=hosts, cp_rank=rank, cp_size=world
        )
        solver.solve(*given_ranges, array[:, 4].tolist())
        solvers.append(solver)
    assert sum(solvers[0].calc_area()) == areas(array).sum()
    held = [np.concatenate([np.arange(*r) for r in host.to_naive_ranges()] or [np.zeros(0, int)]) for host in hosts]
    comm = [solver.make_comm_meta() for solver in solvers]
    times = np.zeros((total, total), dtype=int)
    for rank, solver in enumerate(solvers):
        calc, buffers = solver.make_calc_meta(), []
        for name in ("qo", "kv"):
            args = [getattr(meta, f"{name}_group_collective_args_list")[0] for meta in comm]
            queues = [[] for _ in range(world)]  # what each rank sends to this one, in its order
            for source, arg in enumerate(args):
                parts = np.split(held[source], np.cumsum(arg.input_split_size_list)[:-1])
                queues[source] = [part for part, to in zip(parts, arg.dst_indices_list) if rank in to]
            arrived = [queues[source].pop(0) for source in args[rank].src_index_list]
            assert [len(part) for part in arrived] == args[rank].output_split_size_list and not any(queues)
            assert sum(map(len, arrived)) == getattr(comm[rank], f"num_remote_{name}_tokens_per_stage")[0]
            buffers.append(np.concatenate([held[rank], *arrived]).astype(int))
        local = calc.local_attn_arg.slices.array
        assert not len(local) or (local[:, [1, 3]].max(axis=0) <= len(held[rank])).all()
        for slices in (local, calc.remote_attn_args_list[0].slices.array):
            q, k = np.nonzero(to_dense(slices, *map(len, buffers)))
            np.add.at(times, (buffers[0][q], buffers[1][k]), 1)
        solver.calc_local_range = False
        whole = solver.make_calc_meta()
        parts = [whole.local_attn_arg.slices.array, whole.remote_attn_args_list[0].slices.array]
        mine = solver.bucket_per_rank[rank].to_slices()
        assert (to_dense(np.concatenate(parts), total, total) == to_dense(mine, total, total)).all()
    assert (times == to_dense(array, total, total)).all()


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    algorithm, totals = algorithms.GRGDynamicAttnAlgorithm(), dict(total_seqlen_q=100, total_seqlen_k=100)
    solver = DynamicAttnSolver(algorithm, 4, 2, 64, None, **totals, cp_rank=1, cp_size=3)
    with pytest.raises(ContractError, match="solve"):
        solver.output_solve_result(visualize=True)
    whole = AttnRanges.from_ranges([[0, 100]])
    solver.solve(whole, whole, ["causal"])
    solver.output_solve_result()
    solver.output_solve_result(visualize=True, save_path=str(tmp_path / "a.png"))
    solver.output_solve_result(visualize=True, save_path=str(tmp_path / "b.png"), before_dispatch=True)
    visualize_buckets(solver.bucket_per_rank, title="three ranks", save_path=str(tmp_path / "c.png"))
    for name in "abc":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_solved():
    rects, two = rectangles(np.array(CASES["causal"])), [AttnRectangles(), AttnRectangles()]
    halves = [AttnRanges.from_ranges([r]) for r in ([0, 1024], [1024, 2048])]
    algorithm = algorithms.NCQDynamicAttnAlgorithm()
    for hosts_q, hosts_k, buckets, words in (
        (halves, halves[:1], two, "as many of both"),
        (halves, halves, two[:1], "one each"),
        (halves, [halves[0], halves[0]], two, "overlap"),
        (halves, [halves[0], AttnRanges()], two, "no rank's"),
    ):
        with pytest.raises(ContractError, match=words):
            algorithm.solve(rects, hosts_q, hosts_k, 1, 1, 1, buckets)
    with pytest.raises(ContractError, match="does not know"):
        DynamicAttnSolver(algorithm, 1, 1, 64, None, cp_rank=0, cp_size=2)
