# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from comm_oracle import cast_rows, contributions, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.hierarchical import HierarchicalLayout, split_hierarchical
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.group_spec import GroupSpec
from magi_attention.errors import ContractError, UnsupportedError

meshes = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 4), (4, 2)])


def levels(t, inter, intra):
    """(inter, intra) transports of a world whose rank is node * intra + local."""
    node, local = divmod(t.rank, intra)
    return (
        t.subgroup([m * intra + local for m in range(inter)]),
        t.subgroup([node * intra + i for i in range(intra)]),
    )


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.integers(0, 2**32 - 1), meshes, st.booleans(), st.booleans())
def test_two_levels_match_brute_force(seed, mesh, async_op, keep_layout):
    inter, intra = mesh
    world = inter * intra
    plan = random_plan(seed, world, max_splits=5)
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal((s.input_rows, 2)) for s in plan.specs]
    ys = [rng.standard_normal((s.output_rows, 2)) for s in plan.specs]

    def main(t):
        between, within = levels(t, inter, intra)
        options = dict(inter_group=between, hier_intra_group=within)
        if keep_layout:
            phases = split_hierarchical(plan.specs, inter, intra)[t.rank]
            options["layout"] = HierarchicalLayout(phases)
        x, y = torch.tensor(xs[t.rank]), torch.tensor(ys[t.rank])
        out, back = torch.full_like(y, torch.nan), x.clone()
        cast = group_cast(x, out, *plan.lists(t.rank), t, async_op=async_op, **options)
        reduce = group_reduce(y, back, *plan.reduce_lists(t.rank), t, async_op=async_op, **options)
        cast.wait_post_process(), reduce.wait_post_process()
        crossing = sum(n for m, n in enumerate(between.rows_to) if m != between.rank)
        return out.numpy(), back.numpy(), crossing

    for r, (out, back, crossing) in enumerate(FakeWorld(world).run(main)):
        np.testing.assert_array_equal(out, cast_rows(plan, xs, r))
        for i, terms in enumerate(contributions(plan, ys, r)):
            np.testing.assert_allclose(back[i], xs[r][i] + sum(terms, np.zeros(2)), atol=1e-13)
        # each row once per needing node in the cast, and the partial sums of the nodes this one carries back
        needed = {
            (s, row, j // intra)
            for j, route in enumerate(plan.routes)
            for s, row in route
            if s // intra != j // intra
        }
        sent = sum(s == r for s, _, _ in needed)
        carried = sum(s % intra == r % intra and node == r // intra for s, _, node in needed)
        assert crossing == sent + carried


def all_to_all_specs(world, rows):
    """Every rank sends its rows to all others."""
    return [
        GroupSpec.make(
            r,
            world,
            [rows],
            [[d for d in range(world) if d != r]],
            [rows] * (world - 1),
            [s for s in range(world) if s != r],
        )
        for r in range(world)
    ]


def test_network_rows_against_flat():
    specs = all_to_all_specs(8, 5)
    layouts = [HierarchicalLayout(p) for p in split_hierarchical(specs, 2, 4)]
    assert [lay.network_rows for lay in layouts] == [5] * 8  # flat: 5 rows to each of 4 ranks = 20
    # the ranks of the other node share the load evenly
    assert [lay.inter.recv.count for lay in layouts] == [5] * 8


def test_16_bit_wire_adds_node_sums_in_float32():
    specs = all_to_all_specs(4, 1)
    plan_in = [s.output_rows for s in specs]

    def main(t):
        between, within = levels(t, 2, 2)
        layout = HierarchicalLayout(split_hierarchical(specs, 2, 2)[t.rank])
        y = torch.full((plan_in[t.rank], 1), 1 + 2.0**-10)
        out = torch.zeros(1, 1)
        options = dict(layout=layout, inter_group=between, intra_group=within, comm_dtype=torch.bfloat16)
        return group_reduce(y, out, [], [], [], [], t, **options).wait_post_process().item()

    assert FakeWorld(4).run(main) == [3.0] * 4


def test_what_two_levels_cannot_do():
    specs = all_to_all_specs(4, 1)

    def main(t):
        between, within = levels(t, 2, 2)
        layout = HierarchicalLayout(split_hierarchical(specs, 2, 2)[t.rank])
        y, out = torch.zeros(3, 1), torch.zeros(1, 1)
        options = dict(layout=layout, inter_group=between, intra_group=within)
        with pytest.raises(UnsupportedError, match="sum only"):
            group_reduce(y, out, [], [], [], [], t, reduce_op="avg", **options)
        with pytest.raises(ContractError, match="inter_group and intra_group"):
            group_reduce(y, out, [], [], [], [], t, layout=layout)
        with pytest.raises(ContractError, match=r"node \* node_size \+ local rank"):
            group_cast(torch.zeros(0), torch.zeros(0), [], [], [], [], t, inter_group=t, intra_group=within)

    FakeWorld(4).run(main)
    with pytest.raises(ContractError, match="shape of the device mesh"):
        split_hierarchical(specs, 3, 2)
