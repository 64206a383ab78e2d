# SPDX-License-Identifier: Apache-2.0
"""The kernels of an exchange over nodes for the CPU: threads for ranks, and a network that reorders puts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from comm_oracle import WorldPlan, cast_rows, contributions, random_plan, scattered_nodes
from cpu_verbs import CpuFactory, cast, reduce

from magi_attention.comm.collectives.group import group_reduce
from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.node_exchange import NodeExchange, why_rows_stay
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.transfers import plan_transfers

CPU = torch.device("cpu")
FOLDERS = itertools.count()


def run(library, folder, nodes, main, seed=0, timeout_s=600.0, **options):
    """``main(transport, group, verbs)`` on every rank; ``options`` are attributes of the verbs."""
    folder = folder / str(next(FOLDERS))
    folder.mkdir()

    def rank_main(t):
        factory = CpuFactory(library, folder, seed).attach(t)
        group = exchange_group(t, nodes, CPU, "nvshmem")
        for name, value in options.items():
            setattr(factory.verbs, name, value)
        return main(t, group, factory.verbs)

    return FakeWorld(nodes.world, timeout_s).run(rank_main)


def draw(seed, sizes, sparse=False):
    """Nodes of these sizes, and casts over them."""
    rng = np.random.default_rng(seed)
    nodes = scattered_nodes(sizes, rng)
    casts = (random_plan(seed + 1000 * i, nodes.world, max_splits=5) for i in range(1000))
    few = (c for c in casts if not sparse or 4 <= sum(map(len, c.routes)) <= 14)  # so that ranks run apart
    return nodes, few, int(rng.integers(1, 6))


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SHAPES = [[(2, 8), (2, 8)], [(8,)], [(1, 16), (8,), (24,)]]
CASES = [((2, 2), "float32"), ((3, 2), "bfloat16"), ((1, 2, 2), "float16"), ((1, 1), "float32"), ((2, 3), "float32")]


@pytest.mark.parametrize("sizes, name", CASES)
def test_rows_and_sums(library, tmp_path, sizes, name):
    """Plans of different sizes take turns in one arena, which grows when the third of them comes."""
    dtype, seed = getattr(torch, name), 3
    nodes, casts, block = draw(seed, sizes)
    casts = sorted(itertools.islice(casts, 3), key=lambda c: sum(map(len, c.routes)))
    gen = torch.Generator().manual_seed(seed)
    shapes = {id(routed): SHAPES[i] for i, routed in enumerate(casts)}

    def rows(count, routed):
        return [torch.randn(count, *shape, generator=gen).to(dtype) for shape in shapes[id(routed)]]

    turns = [casts[i] for i in (0, 1, 0, 2, 1, 0, 2, 2)]
    xs = [[rows(s.input_rows, routed) for s in routed.specs] for routed in turns]
    ys = [[rows(s.output_rows, routed) for s in routed.specs] for routed in turns]

    def main(t, group, verbs):
        made = {id(routed): NodeExchange(group, plan_transfers(routed.specs, nodes, block)) for routed in casts}
        found = []
        for epoch, turn in enumerate(turns):
            exchange = made[id(turn)]
            out = cast(exchange, xs[epoch][t.rank])
            for _ in range(2):  # no epoch of casts lies between
                back = [x.to(torch.float32, copy=True) for x in xs[epoch][t.rank]]
                reduce(exchange, ys[epoch][t.rank], back, dtype)
                found.append((out, back))
        assert group.held_bytes == verbs.held == group.arena.num_bytes
        return found

    for rank, found in enumerate(run(library, tmp_path, nodes, main, seed)):
        for i, (out, back) in enumerate(found):
            routed, x, y = turns[i // 2], xs[i // 2], ys[i // 2]
            for k in range(len(shapes[id(routed)])):
                want = cast_rows(routed, [part[k].float().numpy() for part in x], rank)
                np.testing.assert_array_equal(out[k].float().numpy(), want, err_msg=f"seed {seed}")
                terms = contributions(routed, [part[k].double().numpy() for part in y], rank)
                sums = [x[rank][k][row].double().numpy() + sum(t) for row, t in enumerate(terms)]
                if sums:
                    limit = TOLERANCE[dtype]
                    np.testing.assert_allclose(back[k].numpy(), sums, limit, limit, err_msg=f"seed {seed}")
            if i % 2:
                assert all(torch.equal(a, b) for a, b in zip(back, found[i - 1][1])), "the same bits again"


@pytest.mark.parametrize("sizes, name", CASES[:3])
def test_the_lse_companion(library, tmp_path, sizes, name):
    """Rows with their lse, cast together and reduced by it, beside the direct form in float64."""
    dtype = getattr(torch, name)
    nodes, casts, block = draw(11, sizes)
    routed, gen = next(casts), torch.Generator().manual_seed(11)

    def rows(count):
        data, lse = torch.randn(count, 2, 8, generator=gen).to(dtype), torch.randn(count, 2, generator=gen)
        data[:1], lse[:1] = torch.nan, -torch.inf  # a row that saw nothing, whatever it holds
        return [data, torch.cat([lse, lse], 1).view(count, 2, 2)[:, 0].contiguous()]

    def wide(count):  # an lse of 4 heads makes rows of a multiple of 16 bytes
        data, lse = rows(count)
        return [torch.cat([data, data], 1), torch.cat([lse, lse], 1)]

    xs, ys = [wide(s.input_rows) for s in routed.specs], [wide(s.output_rows) for s in routed.specs]

    def main(t, group, verbs):
        exchange = NodeExchange(group, plan_transfers(routed.specs, nodes, block))
        out = cast(exchange, xs[t.rank])
        found = []
        for _ in range(2):
            back = [xs[t.rank][0].to(torch.float32, copy=True), xs[t.rank][1].clone()]
            work, arrived = exchange.start_reduce(ys[t.rank], [dtype, torch.float32], "lse")
            work.wait()
            reduce_arrived(arrived(), back[:1], back[1], "lse", acc_reduce=True)
            found.append(back)
        assert all(torch.equal(a, b) for a, b in zip(*found)), "the same bits again"
        x, x_lse = xs[t.rank][0].double(), xs[t.rank][1].double()
        options = dict(reduce_op="lse", acc_reduce=True, input_lse=ys[t.rank][1].double(), output_lse=x_lse)
        group_reduce(ys[t.rank][0].double(), x, *routed.reduce_lists(t.rank), t, **options).wait_post_process()
        return out, back, (x, x_lse)

    for rank, (out, back, want) in enumerate(run(library, tmp_path, nodes, main)):
        for k in range(2):
            rows_k = cast_rows(routed, [part[k].float().numpy() for part in xs], rank)
            np.testing.assert_array_equal(out[k].float().numpy(), rows_k)
            limit = TOLERANCE[dtype]
            torch.testing.assert_close(back[k].double(), want[k], rtol=limit, atol=limit)


def one_way() -> WorldPlan:
    """Rank 0 sends rows to rank 1 and gets none, so it runs ahead as far as it may."""
    specs = [GroupSpec.make(0, 2, [4], [[1]], [], []), GroupSpec.make(1, 2, [], [], [4], [0])]
    return WorldPlan(specs, [[], [(0, row) for row in range(4)]])


@pytest.mark.parametrize("seed, is_one_way", [(0, False), (1, False), (2, False), (2, True)])
def test_late_ranks_and_slow_puts(library, tmp_path, seed, is_one_way):
    """One epoch right after the other, while puts of some ranks lag behind and one rank comes late all the time."""
    nodes, casts, block = draw(100 + seed, (1, 1) if is_one_way else (2, 2), sparse=not is_one_way)
    routed, epochs = (one_way(), 60) if is_one_way else (next(casts), 12)

    def value(rank, row, epoch):
        return 1000 * epoch + 100 * rank + row + torch.arange(8.0)

    def main(t, group, verbs):
        exchange = NodeExchange(group, plan_transfers(routed.specs, nodes, block))
        spec, found = routed.specs[t.rank], []
        verbs.late = 0.5 if t.rank == seed else verbs.late
        for epoch in range(epochs):
            rows = [value(t.rank, row, epoch) for row in range(spec.input_rows)]
            found += cast(exchange, [torch.stack(rows) if rows else torch.zeros(0, 8)])
        for epoch in range(epochs):
            rows = [value(t.rank, row, epoch) for row in range(spec.output_rows)]
            back = torch.zeros(spec.input_rows, 8)
            reduce(exchange, [torch.stack(rows) if rows else torch.zeros(0, 8)], [back], torch.float32)
            found.append(back)
        return found

    for rank, found in enumerate(run(library, tmp_path, nodes, main, seed, slow_us=20_000)):
        for epoch in range(epochs):
            wanted = [value(s, row, epoch) for s, row in routed.routes[rank]]
            assert torch.equal(found[epoch], torch.stack(wanted) if wanted else torch.zeros(0, 8)), (rank, epoch)
            counts = [spec.output_rows for spec in routed.specs]
            partials = [[value(r, row, epoch).numpy() for row in range(n)] for r, n in enumerate(counts)]
            terms = contributions(routed, partials, rank)
            sums = [torch.as_tensor(sum(t, np.zeros(8))).float() for t in terms]
            assert torch.equal(found[epochs + epoch], torch.stack(sums) if sums else torch.zeros(0, 8)), (rank, epoch)


def test_rows_that_cannot_travel():
    def pack(*shape, dtype=torch.float32):
        return RowPack.of([torch.empty(0, *shape, dtype=dtype)], [dtype])

    assert why_rows_stay(pack(8), pack(8)) is None
    assert why_rows_stay(pack(8, dtype=torch.float64), pack(8)) is None
    assert "Rows of 8 bytes cannot travel" in why_rows_stay(pack(2), pack(8))
    assert "multiple of 8 values" in why_rows_stay(pack(8), pack(4))
    assert "multiple of 8 values" in why_rows_stay(pack(8), pack(8, dtype=torch.float64))
