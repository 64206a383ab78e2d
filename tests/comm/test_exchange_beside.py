# SPDX-License-Identifier: Apache-2.0
"""A cast beside attention, its kernels compiled for the CPU: when a group is passed on, all its rows are there, and
rows that nobody sends are zero. When a rank dies, others find out who."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from comm_oracle import cast_rows, draw_group_ends, everybody, random_plan
from cpu_verbs import CpuFactory

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.beside import ExchangeBeside
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import Region, plan_transfers
from magi_attention.errors import PeerFailureError
from magi_attention.native import abi

CPU, SHAPES, BEHIND, EPOCHS = torch.device("cpu"), ((2, 8), (3, 16)), 5, 4
EPOCH, PUT_DONE, SIGNAL, CTAS = 0, 1, 4, 68  # words of a buffer of one rank, as symm.h numbers them


class Attention:
    """What an attention kernel does with the memory of a rank: it reads a group when its signal is there."""

    def __init__(self, beside: ExchangeBeside, ends: np.ndarray) -> None:
        memory, arena = beside.group.memory, beside.group.arena
        at = arena.control_at(False)
        self.words = memory[at : at + 4096].view(torch.int32)[:: abi.SYMM_WORD_BYTES // 4]
        self.bounds = list(reversed(list(zip([0, *ends.tolist()], ends.tolist()))))
        self.out = []
        for address, shape in zip(beside.cast.out, SHAPES):
            begin, rows = address - memory.data_ptr(), (int(ends[-1]) if len(ends) else 0) + BEHIND
            size = rows * 4 * int(np.prod(shape))
            self.out.append(memory[begin : begin + size].view(torch.float32).view(rows, *shape))
        self.is_over = False

    def run(self) -> None:
        """Copies of the rows that it saw, in the order of the output, and those behind."""
        epoch = int(self.words[EPOCH]) + 1
        self.seen = [torch.full_like(x, torch.nan) for x in self.out]
        for group, (begin, end) in enumerate(self.bounds):
            while not self.is_over and int(self.words[SIGNAL + group]) != epoch:
                time.sleep(1e-5)
            assert int(self.words[SIGNAL + group]) == epoch, "a group was not passed on"
            for seen, x in zip(self.seen, self.out):
                seen[begin:end], seen[self.bounds[0][1] :] = x[begin:end].clone(), x[self.bounds[0][1] :].clone()

    def end(self) -> None:
        epoch = int(self.words[EPOCH]) + 1
        assert int(self.words[PUT_DONE]) == epoch and int(self.words[CTAS]) == 0
        self.words[EPOCH] = epoch


CASES = [((2, 2), 1, 3), ((1, 1), 2, 3), ((3, 1), 3, 1), ((1, 2, 2), 4, 1), ((2, 3), 5, 2)]


@pytest.mark.parametrize("sizes, seed, num_ctas", CASES)
def test_groups_are_whole_when_they_are_passed_on(library, tmp_path, sizes, seed, num_ctas) -> None:
    """One CTA is enough: no put waits for one that comes behind it in the list of its rank."""
    nodes, routed = Nodes.of_sizes(sizes, range(sum(sizes))), random_plan(seed, sum(sizes), max_splits=6)
    group_ends = draw_group_ends(np.random.default_rng(seed), routed)
    plan = plan_transfers(routed.specs, nodes, 3, group_ends)
    padded = []  # rows behind the last one, as up to the end of a tile
    for part in plan.ranks:
        held, out, terms, grads = part.region_rows
        padded.append(replace(part, region_rows=(held, out + BEHIND, terms, grads)))
    plan = replace(plan, ranks=tuple(padded))
    gen = torch.Generator().manual_seed(seed)
    inputs = [
        [[torch.randn(s.input_rows, *shape, generator=gen) for shape in SHAPES] for s in routed.specs]
        for _ in range(EPOCHS)
    ]

    def main(t):
        CpuFactory(library, tmp_path, seed).attach(t)
        group = exchange_group(t, nodes, CPU, "nvshmem")
        packs = [RowPack.of([torch.empty(0, *shape)], [torch.float32]) for shape in SHAPES]
        received = plan.ranks[t.rank].region_rows[Region.OUT] - BEHIND
        beside = ExchangeBeside(group, plan, packs, packs, received, num_ctas)
        attention, found = Attention(beside, group_ends[t.rank] if received else np.zeros(0, np.int64)), []
        for epoch in range(EPOCHS):
            beside.cast.copy_in(inputs[epoch][t.rank])
            thread = threading.Thread(target=attention.run)
            thread.start()
            beside.cast.start(0)
            attention.is_over = True
            thread.join()
            attention.is_over = False
            attention.end()
            for x in attention.out:
                x.fill_(torch.nan)  # before others may write here again
            beside.cast.finish(0)
            found.append(attention.seen)
        group.check("the test")
        return found

    for rank, found in enumerate(FakeWorld(nodes.world, 600.0).run(main)):
        for epoch, seen in enumerate(found):
            for k, x in enumerate(seen):
                want = cast_rows(routed, [part[k].numpy() for part in inputs[epoch]], rank)
                if len(want):
                    np.testing.assert_array_equal(x[:-BEHIND].numpy(), want)
                    assert not x[-BEHIND:].any(), "zeros behind the last row"


class Killed(Exception):
    pass


def test_ranks_that_wait_for_one_another_name_the_rank_that_died(library, tmp_path) -> None:
    """Rank 2 dies in epoch 1, so ranks 0 and 1 lack its credit and send nothing in epoch 2. Each of the two finds first
    that the other one sends nothing."""
    nodes, rows = Nodes.of_sizes((2, 1), range(3)), 16
    plan = plan_transfers(everybody(3, rows), nodes)
    texts: dict[int, str] = {}

    def main(t):
        factory = CpuFactory(library, tmp_path).attach(t)
        group, pack = exchange_group(t, nodes, CPU, "nvshmem"), [RowPack.of([torch.empty(0, 8)], [torch.float32])]
        cast = ExchangeBeside(group, plan, pack, pack, 2 * rows).cast
        cast.copy_in([torch.ones(rows, 8)])
        cast.start(0)
        if t.rank == 2:
            raise Killed("its power went")
        cast.finish(0)
        group.check("epoch 1")
        factory.verbs.puts_late_ms = 300
        cast.start(0)
        with pytest.raises(PeerFailureError) as info:
            group.check("epoch 2")
        texts[t.rank] = str(info.value)

    with pytest.raises(Killed):
        FakeWorld(3, 3.0).run(main)
    assert set(texts) == {0, 1}
    for text in texts.values():
        assert text.startswith("Rank 2 (node 1) did not deliver within 3 s") and "its power went" in text, text
