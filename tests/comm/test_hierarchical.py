# SPDX-License-Identifier: Apache-2.0
"""Group cast and reduce over nodes beside the direct form, and beside what they must give."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from comm_oracle import cast_rows, everybody, random_plan, scattered_nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.hierarchical import HierarchicalLayout, join_nodes
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.phases import two_level_cast
from magi_attention.errors import ContractError
from magi_attention.testing.spawn import run_processes

EVEN = [(1,), (3,), (1, 1), (2, 2), (2, 2, 2), (4, 4), (2, 2, 2, 2)]
UNEVEN = [(3, 2), (1, 3), (2, 1, 3), (4, 1), (1, 1, 5)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def run_op(t, plan, seed, op, dtype, acc, options):
    """A cast of three tensors (beside an lse, or not) and a reduce of three; everything that they write."""
    gen = torch.Generator().manual_seed(seed * 64 + t.rank)
    spec = plan.specs[t.rank]

    def rows(count, *shape, dtype=dtype):
        return torch.randn(count, *shape, generator=gen, dtype=torch.float64).to(dtype)

    shapes = [(2, 3), (2, 3), (2, 3)] if op == "lse" else [(3,), (2, 2), (1,)]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    xs, outs = [rows(spec.input_rows, *s) for s in shapes], [rows(spec.output_rows, *s) for s in shapes]
    x_lse, out_lse = (rows(n, 2, dtype=lse_dtype) for n in (spec.input_rows, spec.output_rows))
    lse = dict(cast_lse=True, input_lse=x_lse, output_lse=out_lse) if op == "lse" else {}
    group_cast(xs, outs, *plan.lists(t.rank), t, **lse, **options).wait_post_process()
    found = [*outs, out_lse.clone()]
    partials = [rows(spec.output_rows, *s) for s in shapes]
    if op == "lse":
        partials[0][:1], out_lse[:1] = torch.nan, -torch.inf  # a row that saw nothing, whatever it holds
        lse = dict(input_lse=out_lse, output_lse=x_lse)
    more = dict(reduce_op=op, acc_reduce=acc, **lse, **options)
    group_reduce(partials, xs, *plan.reduce_lists(t.rank), t, **more).wait_post_process()
    return [*found, *xs, x_lse]


def check_against_direct(t, nodes, intra, plan, seed, op, dtype, acc):
    """Casts give the same bits as the direct form, reduces the same up to rounding and the same bits again."""
    layout = HierarchicalLayout(two_level_cast(plan.specs, nodes, t.rank))
    direct = run_op(t, plan, seed, op, dtype, acc, {})
    twice = [run_op(t, plan, seed, op, dtype, acc, dict(intra_group=intra, layout=layout)) for _ in range(2)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for i, (want, got, again) in enumerate(zip(direct, *twice)):
        assert torch.equal(got, again), (seed, op, dtype, i)
        if i < 4:
            assert torch.equal(got, want), (seed, op, dtype, i)
        else:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=f"{seed} {op} {dtype} {i}")


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    st.integers(0, 2**16),
    st.sampled_from(EVEN + UNEVEN),
    st.sampled_from(["sum", "avg", "lse"]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_every_operation_against_the_direct_form(seed, sizes, op, dtype, acc):
    """And sums: each row crosses once for each other node that needs it, and one sum of each such node comes back."""
    rng = np.random.default_rng(seed)
    nodes = scattered_nodes(sizes, rng)
    plan = random_plan(seed, nodes.world, max_splits=5)
    xs = [rng.standard_normal((spec.input_rows, 2)) for spec in plan.specs]

    def main(t):
        intra = t.subgroup(nodes.mates(t.rank))
        out = torch.full((plan.specs[t.rank].output_rows, 2), torch.nan, dtype=torch.float64)
        options = dict(hier_intra_group=intra, async_op=True)
        cast = group_cast(torch.tensor(xs[t.rank]), out, *plan.lists(t.rank), t, **options)
        cast.wait_post_process()
        back = torch.zeros(len(xs[t.rank]), 2, dtype=torch.float64)
        group_reduce(out, back, *plan.reduce_lists(t.rank), t, **options).wait_post_process()
        crossing = sum(n for rank, n in enumerate(t.rows_to) if rank not in nodes.mates(t.rank))
        check_against_direct(t, nodes, intra, plan, seed, op, dtype, acc)
        return out.numpy(), crossing

    found = FakeWorld(nodes.world).run(main)
    needs = {(s, row, nodes.node_of[j]) for j, route in enumerate(plan.routes) for s, row in route}
    assert sum(crossing for _, crossing in found) == 2 * sum(nodes.node_of[s] != node for s, _, node in needs)
    for rank, (out, _) in enumerate(found):
        np.testing.assert_array_equal(out, cast_rows(plan, xs, rank))


GLOO = [("2", 4), ("3", 5)]  # declared sizes, and ranks of the group


def gloo_main(rank, world):
    for case, (declared, size) in enumerate(GLOO):
        group = dist.group.WORLD if size == world else dist.new_group(range(size))
        if rank >= size:
            continue
        t = as_transport(group)
        levels = join_nodes(t, tuple(map(int, declared.split(","))), None)
        for n, op in enumerate(("sum", "avg", "lse")):
            seed = 100 * case + n
            plan = random_plan(seed, size, max_splits=5)
            check_against_direct(t, levels.nodes, levels.intra, plan, seed, op, DTYPES[(case + n) % 4], n != 1)
    return True


def test_gloo():
    assert run_processes(5, gloo_main) == [True] * 5


def test_network_rows_against_the_direct_form():
    specs, nodes = everybody(8, 5), Nodes.of_sizes((4,), range(8))
    layouts = [HierarchicalLayout(two_level_cast(specs, nodes, r)) for r in range(8)]
    assert [lay.network_rows for lay in layouts] == [5] * 8  # directly: 5 rows to each of 4 ranks = 20
    # the ranks of the other node share the load evenly: 3 mates, and 1 far rank each
    assert [lay.exchange.recv.count for lay in layouts] == [20] * 8


def test_16_bit_wire_adds_node_sums_in_float32():
    specs, nodes = everybody(4, 1), Nodes.of_sizes((2,), range(4))

    def main(t):
        layout = HierarchicalLayout(two_level_cast(specs, nodes, t.rank))
        y = torch.full((3, 1), 1 + 2.0**-10)
        out = torch.zeros(1, 1)
        options = dict(layout=layout, intra_group=t.subgroup(nodes.mates(t.rank)), comm_dtype=torch.bfloat16)
        return group_reduce(y, out, [], [], [], [], t, **options).wait_post_process().item()

    assert FakeWorld(4).run(main) == [3.0] * 4


def test_nodes_of_declared_sizes():
    assert Nodes.of_sizes((2,), range(5)).node_of == (0, 0, 1, 1, 2)
    assert Nodes.of_sizes((3, 2), range(5)).members == ((0, 1, 2), (3, 4))
    # one context-parallel group among several: every second rank of nodes of 4
    assert Nodes.of_sizes((4,), (1, 3, 5, 7)).node_of == (0, 0, 1, 1)
    with pytest.raises(ContractError, match="have 3 in all, but there is a rank 3"):
        Nodes.of_sizes((2, 1), range(4))
    with pytest.raises(ContractError, match="at least one rank"):
        Nodes.of_sizes((0,), range(4))


def test_the_launcher_says_who_shares_a_node():
    def main(t):
        return join_nodes(t, (), t.rank // 3).nodes.node_of, join_nodes(t, (2,), None).intra.ranks

    assert FakeWorld(5).run(main) == [((0, 0, 0, 1, 1), ranks) for ranks in [(0, 1), (0, 1), (2, 3), (2, 3), (4,)]]

    def nobody(t):
        join_nodes(t, (), None if t.rank == 1 else 0)

    def differently(t):
        join_nodes(t, (t.rank + 1,), None)

    with pytest.raises(ContractError, match="On rank 1 nothing says on which node"):
        FakeWorld(2).run(nobody)
    with pytest.raises(ContractError, match=r"different node sizes: \[\[1\], \[2\]\]"):
        FakeWorld(2).run(differently)


def test_groups_and_layouts_that_do_not_fit():
    specs, nodes = everybody(4, 1), Nodes.of_sizes((2,), range(4))

    def main(t):
        within = t.subgroup(nodes.mates(t.rank))
        layout = HierarchicalLayout(two_level_cast(specs, nodes, t.rank))
        y, out = torch.zeros(3, 1), torch.zeros(1, 1)
        with pytest.raises(ContractError, match="needs intra_group"):
            group_reduce(y, out, [], [], [], [], t, layout=layout)
        with pytest.raises(ContractError, match="of a node of 2"):
            group_reduce(y, out, [], [], [], [], t, layout=layout, intra_group=t)
        none = torch.zeros(0)
        with pytest.raises(ContractError, match="alone says nothing"):
            group_cast(none, none, [], [], [], [], t, inter_group=within)

    def overlapping(t):
        none = torch.zeros(0)
        group_cast(none, none, [], [], [], [], t, intra_group=t.subgroup([0, 1, 2, 3] if t.rank < 3 else [3]))

    FakeWorld(4).run(main)
    with pytest.raises(ContractError, match="must divide the ranks"):
        FakeWorld(4).run(overlapping)
    with pytest.raises(ContractError, match="one spec per rank"):
        two_level_cast(specs, Nodes.of_sizes((2,), range(6)), 0)
