# SPDX-License-Identifier: Apache-2.0
"""The kernels of an exchange over nodes, compiled for the CPU: threads for ranks, and a network that reorders puts."""

from __future__ import annotations

import ctypes
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from comm_oracle import cast_rows, contributions, random_plan

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.nvshmem.exchange import NodeExchange
from magi_attention.comm.nvshmem.tables import Arena
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import plan_transfers
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

SOURCE = Path(__file__).with_name("nvshmem_on_cpu.cpp")
HERE = ("comm/nvshmem_verbs.cuh", "comm/symm/accumulate.cuh")
KERNELS = ("nvshmem_put.cu", "nvshmem_wait.cu", "nvshmem_sum.cu", "nvshmem_end.cu", "nvshmem_verbs.cuh")


def for_the_cpu(text: str) -> str:
    """Without launchers and headers of CUDA and NVSHMEM: what those do is in ``nvshmem_on_cpu.cpp``."""
    text = re.split(r'extern "C"', text)[0]
    return re.sub(
        r'#include [<"]([^>"]+)[>"]\n', lambda m: m[0] if m[1] in HERE or m[1].startswith("magi/") else "", text
    )


@pytest.fixture(scope="module")
def library(compile_folder):
    csrc, folder = csrc_or_skip(), compile_folder / "exchange"

    def write_sources() -> None:
        (folder / "comm" / "symm").mkdir(parents=True)
        for name in (*KERNELS, "symm/accumulate.cuh"):
            (folder / "comm" / name).write_text(for_the_cpu((csrc / "comm" / name).read_text()))

    flags = ("-O1", "-std=c++20", "-pthread", "-Wno-unknown-pragmas", "-Wno-unused-function")
    return compiled_or_skip(folder, [SOURCE], [folder, csrc / "include"], *flags, prepare=write_sources)


class CpuVerbs:
    """Launches that follow one another; at times a rank is late."""

    def __init__(self, library, network: int, rank: int) -> None:
        self.library, self.where, self.late = library, (network, rank), 0.02
        self.random = random.Random(64 * network + rank)

    def launch(self, name: str, params) -> None:
        if self.random.random() < self.late:
            time.sleep(0.02 * self.random.random())
        getattr(self.library, name)(ctypes.byref(params), *self.where)

    def put(self, params) -> None:
        self.launch("put", params)

    def wait(self, params) -> None:
        self.launch("wait", params)

    def sum(self, params) -> None:
        self.launch("sum", params)

    def end(self, params) -> None:
        self.launch("end", params)


class CpuNetwork:
    """Memory of all ranks in this process, with a network between them."""

    count = 0

    def __init__(self, library, world: int, seed: int) -> None:
        CpuNetwork.count += 1
        self.library, self.id, self.seed = library, CpuNetwork.count, seed
        self.memory: list[torch.Tensor] = []
        self.slow_us = 500

    def allocate(self, num_bytes: int) -> torch.Tensor:
        raw = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        begin = -raw.data_ptr() % 64
        self.memory.append(raw[begin : begin + num_bytes])
        return self.memory[-1]

    def __enter__(self):
        arenas = (ctypes.c_void_p * len(self.memory))(*(x.data_ptr() for x in self.memory))
        self.library.network(self.id, len(self.memory), arenas, self.seed, self.slow_us)
        return self

    def __exit__(self, *args) -> None:
        self.library.network_ends(self.id)


def exchanges(library, seed, sizes, shapes, dtype, sparse=False):
    """A cast over nodes of these sizes, and what runs it on each rank."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    nodes = Nodes.of((rng.permutation(labels) if rng.random() < 0.3 else labels).tolist())
    casts = (random_plan(seed + 1000 * i, nodes.world, max_splits=5) for i in range(1000))
    few = (c for c in casts if not sparse or 4 <= sum(map(len, c.routes)) <= 14)  # so that ranks run apart
    cast = next(few)
    plan = plan_transfers(cast.specs, nodes, int(rng.integers(1, 6)))
    network = CpuNetwork(library, nodes.world, seed)
    pack = RowPack.of([torch.empty(0, *shape) for shape in shapes], [dtype] * len(shapes))
    made = [
        NodeExchange(CpuVerbs(library, network.id, rank), plan, rank, pack, pack, network.allocate, lambda: 0)
        for rank in range(nodes.world)
    ]
    return nodes, cast, network, made


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SHAPES = [[(2, 8), (2, 8)], [(8,)], [(1, 16), (8,), (24,)]]


CASES = [((2, 2), "float32"), ((3, 2), "bfloat16"), ((1, 2, 2), "float16"), ((1, 1), "float32"), ((2, 3), "float32")]


@pytest.mark.parametrize("sizes, name", CASES)
def test_rows_and_sums(library, sizes, name):
    dtype = getattr(torch, name)
    for seed in range(3):
        shapes = SHAPES[seed % len(SHAPES)]
        nodes, cast, network, made = exchanges(library, seed, sizes, shapes, dtype)
        gen = torch.Generator().manual_seed(seed)
        epochs = 3

        def rows(count, shapes=shapes, gen=gen):
            return [torch.randn(count, *shape, generator=gen).to(dtype) for shape in shapes]

        xs = [[rows(s.input_rows) for s in cast.specs] for _ in range(epochs)]
        ys = [[rows(s.output_rows) for s in cast.specs] for _ in range(epochs)]

        def main(rank, made=made, xs=xs, ys=ys, epochs=epochs):
            found = []
            for epoch in range(epochs):
                out = made[rank].cast(xs[epoch][rank])
                base = [x.float() for x in xs[epoch][rank]]
                for _ in range(2):  # no epoch of casts lies between
                    back = [x.clone() for x in base]
                    made[rank].reduce(ys[epoch][rank], back)
                    found.append((out, back))
                made[rank].check()
            return found

        with network, ThreadPoolExecutor(nodes.world) as pool:
            results = list(pool.map(main, range(nodes.world)))
        for rank, found in enumerate(results):
            for i, (out, back) in enumerate(found):
                x, y = xs[i // 2], ys[i // 2]
                for k in range(len(shapes)):
                    want = cast_rows(cast, [part[k].float().numpy() for part in x], rank)
                    np.testing.assert_array_equal(out[k].float().numpy(), want, err_msg=f"seed {seed}")
                    terms = contributions(cast, [part[k].double().numpy() for part in y], rank)
                    sums = [x[rank][k][row].double().numpy() + sum(t) for row, t in enumerate(terms)]
                    if sums:
                        limit = TOLERANCE[dtype]
                        np.testing.assert_allclose(back[k].numpy(), sums, limit, limit, err_msg=f"seed {seed}")
                if i % 2:
                    assert all(torch.equal(a, b) for a, b in zip(back, found[i - 1][1])), "the same bits again"


@pytest.mark.parametrize("seed", range(3))
def test_late_ranks_and_slow_puts(library, seed):
    """One epoch right after the other, while puts of some ranks lag behind and one rank comes late all the time."""
    nodes, cast, network, made = exchanges(library, 100 + seed, (2, 2), [(8,)], torch.float32, sparse=True)
    network.slow_us, made[seed]._verbs.late, epochs = 20_000, 0.5, 12

    def value(rank, row, epoch):
        return 1000 * epoch + 100 * rank + row + torch.arange(8.0)

    def main(rank):
        spec, found = cast.specs[rank], []
        for epoch in range(epochs):
            rows = [value(rank, row, epoch) for row in range(spec.input_rows)]
            found.append(made[rank].cast([torch.stack(rows) if rows else torch.zeros(0, 8)])[0])
        for epoch in range(epochs):
            rows = [value(rank, row, epoch) for row in range(spec.output_rows)]
            back = torch.zeros(spec.input_rows, 8)
            made[rank].reduce([torch.stack(rows) if rows else torch.zeros(0, 8)], [back])
            found.append(back)
        return found

    with network, ThreadPoolExecutor(nodes.world) as pool:
        results = list(pool.map(main, range(nodes.world)))
    for rank, found in enumerate(results):
        for epoch in range(epochs):
            wanted = [value(s, row, epoch) for s, row in cast.routes[rank]]
            assert torch.equal(found[epoch], torch.stack(wanted) if wanted else torch.zeros(0, 8)), (rank, epoch)
            counts = [spec.output_rows for spec in cast.specs]
            partials = [[value(r, row, epoch).numpy() for row in range(n)] for r, n in enumerate(counts)]
            terms = contributions(cast, partials, rank)
            sums = [torch.as_tensor(sum(t, np.zeros(8))).float() for t in terms]
            assert torch.equal(found[epochs + epoch], torch.stack(sums) if sums else torch.zeros(0, 8)), (rank, epoch)


def test_a_rank_that_does_not_come_is_named(library):
    """Rank 0 needs rows of rank 1 alone, which never calls."""
    specs = [GroupSpec.make(0, 2, [], [], [3], [1]), GroupSpec.make(1, 2, [3], [[0]], [], [])]
    plan, network = plan_transfers(specs, Nodes.of_sizes((1,), range(2))), CpuNetwork(library, 2, 0)
    pack = RowPack.of([torch.empty(0, 8)], [torch.float32])
    made = [
        NodeExchange(CpuVerbs(library, network.id, r), plan, r, pack, pack, network.allocate, lambda: 0, timeout_ms=50)
        for r in range(2)
    ]
    with network:
        made[0].check()
        made[0].cast([torch.zeros(0, 8)])
    with pytest.raises(PeerFailureError, match="Rank 1 did not deliver within 0.05 s to rank 0"):
        made[0].check()


def test_rows_that_cannot_travel(library):
    with pytest.raises(ContractError, match="multiple of 8 values"):
        exchanges(library, 1, (1, 1), [(4,)], torch.float32)
    with pytest.raises(ContractError, match="multiple of 8 values"):
        exchanges(library, 1, (1, 1), [(8,)], torch.float64)
    plan = plan_transfers(random_plan(1, 2).specs, Nodes.of_sizes((1,), range(2)))
    with pytest.raises(ContractError, match="Rows of 8 bytes cannot travel"):
        Arena.of(plan, 8, 32)
