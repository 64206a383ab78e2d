# SPDX-License-Identifier: Apache-2.0
"""The row kernels against the torch operations on the CPU, over random ranges, shapes, dtypes and layouts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.group_spec import GroupSpec
from magi_attention.kernels import range_fill_, range_gather, range_reduce
from magi_attention.native.rows import ALL_ROWS, MAX_RANGES, RowList, row_kernels

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="There is no CUDA device."),
    pytest.mark.skipif(
        HAS_GPU and torch.cuda.get_device_capability() != (9, 0), reason="The kernels are for compute capability 9.0."
    ),
]
NEG = float("-inf")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# elements of a row: below, at and beside what one vector holds, and longer than one block walks
WIDTHS = (1, 3, 8, 24, 64, 65, 129, 1024, 20_000)


def draw(rng: np.random.Generator, rows: int, sizes: np.ndarray) -> torch.Tensor:
    starts = np.array([rng.integers(0, rows - n + 1) for n in sizes], dtype=np.int64).reshape(-1)
    return torch.from_numpy(np.stack([starts, starts + sizes], 1))


def draw_sizes(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return rng.integers(0, max(2, rows // 3), count)


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values with other strides and alignments; rows stay dense."""
    wide = torch.zeros(x.shape[0], x[0].numel() + 5, dtype=x.dtype, device=x.device)
    strided = wide[:, 3 : 3 + x[0].numel()]
    strided.copy_(x.reshape(x.shape[0], -1))
    return {"dense": x.reshape(x.shape[0], -1), "strided": strided}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_gather_and_fill(dtype):
    for seed, width in enumerate(WIDTHS):
        rng = np.random.default_rng(seed)
        count = (0, 1, 7, 300, MAX_RANGES)[seed % 5] if width < 1024 else 5
        data = torch.from_numpy(rng.integers(-100, 100, (97, width))).to(dtype)
        ranges = draw(rng, 97, draw_sizes(rng, 97, count))
        bits = data.view(torch.int8) if dtype.itemsize == 1 else data  # of which torch gathers all
        want = range_gather(bits, ranges).view(dtype)
        for (name, x), kind in product(layouts(data.cuda()).items(), (torch.int32, torch.int64)):
            on_device = ranges.to("cuda", kind)
            for got in (
                range_gather(x, on_device),
                range_gather(x, on_device, total_size=len(want)),
                range_gather(x, ranges.to(kind), output=torch.zeros_like(want, device="cuda")),
            ):
                assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), (seed, width, name, kind)
        if dtype.itemsize > 1:
            for name, x in layouts(data.cuda()).items():
                got = range_fill_(x.clone(), ranges.cuda(), -7.5)
                assert torch.equal(got.cpu(), range_fill_(data.clone(), ranges, -7.5)), (seed, width, name)


def test_many_ranges_and_other_dims():
    rng = np.random.default_rng(0)
    data = torch.randn(50, 40, 6)
    ranges = draw(rng, 40, rng.integers(0, 3, MAX_RANGES + 1))
    assert torch.equal(range_gather(data.cuda(), ranges.cuda(), 1).cpu(), range_gather(data, ranges, 1))
    moved = data.cuda().transpose(0, 1)
    assert torch.equal(range_gather(moved, ranges.cuda()).cpu(), range_gather(data.transpose(0, 1), ranges))
    x = data.cuda().requires_grad_()
    range_gather(x, ranges.cuda(), 1).sum().backward()
    assert float(x.grad.sum()) == 50 * 6 * int((ranges[:, 1] - ranges[:, 0]).sum())


@pytest.mark.parametrize(("source", "target"), [*product(FLOATS, FLOATS), (torch.float64, torch.float64)], ids=str)
def test_sum_and_average(source, target):
    for seed, width in enumerate(WIDTHS[:-1]):
        rng = np.random.default_rng(seed)
        sizes = draw_sizes(rng, 60, (0, 1, 40, 300)[seed % 4])
        sources, targets = draw(rng, 80, sizes), draw(rng, 60, sizes)
        x, old = torch.randn(80, width).to(source), torch.randn(60, width).to(target)
        for op, acc in product(("sum", "avg"), (True, False)):
            want = range_reduce(x, old.clone(), sources, targets, 0, True, op, acc_reduce=acc)
            for name, y in layouts(old.cuda()).items():
                got = y.clone() if name == "dense" else y
                back = range_reduce(
                    layouts(x.cuda())[name], got, sources.cuda(), targets.cuda(), 0, True, op, acc_reduce=acc
                )
                assert back is got and torch.equal(got.cpu(), want), (seed, width, op, acc, name)


@pytest.mark.parametrize(("source", "target"), [*product(FLOATS, FLOATS)], ids=str)
def test_merge_by_lse(source, target):
    for seed, (heads, dim) in enumerate([(1, 1), (3, 5), (4, 64), (64, 128), (7, 24)]):
        rng = np.random.default_rng(seed)
        sizes = draw_sizes(rng, 40, (0, 3, 60)[seed % 3])
        sources, targets = draw(rng, 50, sizes), draw(rng, 40, sizes)
        x, old = torch.randn(50, heads, dim).to(source), torch.randn(40, heads, dim).to(target)
        x_lse, old_lse = 5 * torch.randn(50, heads), 5 * torch.randn(40, heads)
        x_lse[torch.rand_like(x_lse) < 0.3] = NEG
        old_lse[torch.rand_like(old_lse) < 0.3] = NEG
        x[x_lse == NEG] = float("nan")  # where nothing was seen there may be anything
        old[old_lse == NEG] = float("nan")
        for acc in (True, False):
            exact = old.double(), old_lse.double()
            range_reduce(
                x.double(), exact[0], sources, targets, 0, True, "lse", acc_reduce=acc, input_lse=x_lse.double(),
                output_lse=exact[1],
            )  # fmt: skip
            got, got_lse = old.cuda(), old_lse.cuda()
            range_reduce(
                x.cuda(), got, sources.cuda(), targets.cuda(), 0, True, "lse", acc_reduce=acc, input_lse=x_lse.cuda(),
                output_lse=got_lse,
            )  # fmt: skip
            assert torch.allclose(got_lse.cpu().double(), exact[1], rtol=1e-5, atol=1e-5), (seed, acc)
            tolerance = 1e-5 if target == torch.float32 else 2.0 ** (-8 if target == torch.bfloat16 else -11)
            error = (got.cpu().double() - exact[0]).abs() / (1 + exact[0].abs())
            assert not (got.cpu().isnan() != exact[0].isnan()).any(), (seed, acc)
            assert float(error.nan_to_num().max()) <= tolerance, (seed, acc)


def test_copy_of_several_tensors_rounds_on_the_way():
    kernels = row_kernels(torch.zeros(1, device="cuda"))
    assert kernels is not None, "The library has no row kernels."
    rng = np.random.default_rng(1)
    rows = rng.permutation(500)[:300]
    listed = RowList(torch.from_numpy(rows.astype(np.int32)).cuda(), len(rows))
    k, v = torch.randn(500, 8, 64, device="cuda"), torch.randn(500, 8, 48, device="cuda")
    lse = torch.randn(500, 3, device="cuda", dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wire = torch.full((300, 8 * 112 + 3), 7.0, dtype=dtype, device="cuda")
        columns = wire[:, :512].view(300, 8, 64), wire[:, 512:896].view(300, 8, 48)
        packed = torch.empty(300, 3, device="cuda", dtype=torch.float64)
        assert kernels.copy([*zip(columns, (k, v)), (packed, lse)], ALL_ROWS, listed, 300)
        for got, x in zip((*columns, packed), (k, v, lse)):
            assert torch.equal(got, x[rows].to(got.dtype))
        assert (wire[:, 896:] == 7).all()
        back = torch.zeros(500, 8, 64, dtype=dtype, device="cuda")
        assert kernels.copy([(back, columns[0])], listed, ALL_ROWS, 300)
        assert torch.equal(back[rows], columns[0]) and int(back.ne(0).any(-1).any(-1).sum()) == 300


def test_in_a_graph_and_the_same_on_every_run():
    rng = np.random.default_rng(2)
    sizes = draw_sizes(rng, 500, 200)
    sources, targets = draw(rng, 700, sizes).cuda(), draw(rng, 500, sizes).cuda()
    x, old = torch.randn(700, 256, device="cuda").bfloat16(), torch.randn(500, 256, device="cuda")
    want = range_reduce(x, old.clone(), sources, targets)
    total = int((sources[:, 1] - sources[:, 0]).sum())
    wanted_rows = range_gather(x, sources)
    graph, static = torch.cuda.CUDAGraph(), old.clone()
    with torch.cuda.graph(graph):
        static.copy_(old)
        range_reduce(x, static, sources, targets)
        gathered = range_gather(x, sources, total_size=total)
    for _ in range(5):
        static.zero_()
        gathered.zero_()
        graph.replay()
        assert torch.equal(static, want) and torch.equal(gathered, wanted_rows)
        assert torch.equal(range_reduce(x, old.clone(), sources, targets), want)


def random_specs(seed: int, world: int) -> list[GroupSpec]:
    """Splits of random sizes to random other ranks."""
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(0, 40, rng.integers(1, 9)).tolist() for _ in range(world)]
    wanted = [
        [tuple(int(d) for d in range(world) if d != r and rng.random() < 0.5) for _ in sizes[r]] for r in range(world)
    ]
    specs = []
    for rank in range(world):
        queues = {r: [n for n, dst in zip(sizes[r], wanted[r]) if rank in dst] for r in range(world)}
        sources = rng.permutation([r for r, queue in queues.items() for _ in queue]).astype(int).tolist()
        arriving = [(queues[r].pop(0), r) for r in sources]  # of one source in its order
        specs.append(
            GroupSpec(
                rank=rank,
                world=world,
                input_splits=tuple(sizes[rank]),
                dst_indices=tuple(wanted[rank]),
                output_splits=tuple(n for n, _ in arriving),
                src_index=tuple(r for _, r in arriving),
            )  # fmt: skip
        )
    return specs


def exchange(
    transport, specs: list[GroupSpec], device: str, dtype: torch.dtype, wire: torch.dtype
) -> list[torch.Tensor]:
    """A cast of two tensors, the reduce back, and a reduce by lse."""
    spec = specs[transport.rank]
    gen = torch.Generator().manual_seed(spec.rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(device)

    held, received = spec.input_rows, spec.output_rows
    splits, others = [[*spec.input_splits], [*spec.output_splits]], [[*map(list, spec.dst_indices)], [*spec.src_index]]
    lists, back = [*splits, *others], [*splits[::-1], *others[::-1]]
    options = {"layout": A2AVLayout.from_spec(spec), "async_op": True}
    out = [torch.zeros(received, 2, d, dtype=dtype, device=device) for d in (24, 8)]
    kv = [draw(held, 2, d).to(dtype) for d in (24, 8)]
    group_cast(kv, out, *lists, transport, **options).wait_post_process()
    grads, sums = [draw(received, 2, d) for d in (24, 8)], [draw(held, 2, d) for d in (24, 8)]
    group_reduce(grads, sums, *back, transport, comm_dtype=wire, **options).wait_post_process()
    mean = draw(held, 2, 24).to(dtype)
    group_reduce(out[0], mean, *back, transport, reduce_op="avg", acc_reduce=False, **options).wait_post_process()
    lse, merged_lse, merged = draw(received, 2), draw(held, 2), draw(held, 2, 8)
    group_reduce(
        grads[1], merged, *back, transport, reduce_op="lse", input_lse=lse, output_lse=merged_lse, **options
    ).wait_post_process()
    return [x.cpu() for x in (*out, *sums, mean, merged, merged_lse)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_group_collectives_are_those_of_the_cpu(dtype):
    for seed, world in product(range(6), (2, 4)):
        specs = random_specs(seed, world)
        for wire in (dtype, torch.float32):
            want = FakeWorld(world).run(exchange, specs, "cpu", dtype, wire)
            got = FakeWorld(world).run(exchange, specs, "cuda", dtype, wire)
            for rank, (mine, theirs) in enumerate(zip(got, want)):
                for i, (a, b) in enumerate(zip(mine, theirs)):
                    same = torch.equal(a, b) if i < 5 else torch.allclose(a, b, rtol=1e-5, atol=1e-5)
                    assert same, (seed, world, wire, rank, i)


@pytest.mark.whole_gpu
def test_rows_beyond_four_gigabytes():
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of GPU memory")
    x = torch.zeros(5 * 2**20, 1024, dtype=torch.int8, device="cuda")
    x[-3:] = torch.arange(1, 4, dtype=torch.int8, device="cuda")[:, None]
    rows = torch.tensor([[5 * 2**20 - 3, 5 * 2**20], [0, 2]], device="cuda")
    assert range_gather(x, rows)[:, 1023].tolist() == [1, 2, 3, 0, 0]
