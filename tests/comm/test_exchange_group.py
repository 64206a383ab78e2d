# SPDX-License-Identifier: Apache-2.0
"""The group of an exchange over nodes: who votes for it, its memory, and what the others say when a rank dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comm_oracle import everybody
from cpu_verbs import CpuFactory, cast, reduce

from magi_attention.comm.exchange import verbs
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.node_exchange import NodeExchange
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import plan_transfers
from magi_attention.errors import ContractError, PeerFailureError, UnsupportedError

CPU = torch.device("cpu")
NODES = Nodes.of_sizes((2,), range(4))
FOLDERS = itertools.count()


@pytest.fixture
def new_folder(tmp_path):
    def make():
        folder = tmp_path / str(next(FOLDERS))
        folder.mkdir()
        return folder

    return make


# ---- the vote -------------------------------------------------------------------------------------------------------
def votes(library, folder, lacks, wish="auto", error=None, nodes=NODES, versions=("1.0",) * 4):
    def main(t):
        factory = CpuFactory(library, folder, lack=lacks[t.rank]).attach(t)
        factory.error, factory.version = error if t.rank == 1 else None, versions[t.rank]
        try:
            groups = [exchange_group(t, nodes, CPU, wish) for _ in range(2)]
        except UnsupportedError as exc:
            return str(exc)
        assert groups[0] is groups[1], "asked once"
        return groups[0] is not None

    return FakeWorld(nodes.world).run(main)


def test_one_rank_that_cannot_is_enough(library, new_folder, caplog):
    caplog.set_level(logging.INFO, "magi_attention.comm")
    assert votes(library, new_folder(), [None] * 4) == [True] * 4
    assert "between 2 nodes by a network of threads 1.0, on all 4 ranks" in caplog.text
    caplog.clear()
    lacks = [None, None, "it has no library.", None]
    assert votes(library, new_folder(), lacks) == [False] * 4
    sentence = "between nodes by all-to-all-v: On rank 2 (node 1) it has no library."
    assert len(re.findall(re.escape(sentence), caplog.text)) == 4, "once on each rank"
    caplog.clear()
    error = UnsupportedError("no symmetric memory.")
    assert votes(library, new_folder(), [None] * 4, error=error) == [False] * 4
    assert "On rank 1 (node 0) a network of threads did not join: no symmetric memory." in caplog.text
    assert votes(library, new_folder(), [None] * 4, versions=("1.0", "1.0", "1.1", "1.1")) == [False] * 4
    assert "Rank 0 (node 0) has a network of threads 1.0, and rank 2 (node 1) has 1.1; install the same" in caplog.text


def test_wishes(library, new_folder):
    texts = votes(library, new_folder(), [None, None, None, "it is another machine"], "nvshmem")
    assert len(set(texts)) == 1, "all ranks raise alike"
    assert "NODE_TRANSPORT=nvshmem cannot be done here: On rank 3 (node 1) it is another machine. Unset it" in texts[0]
    assert votes(library, new_folder(), [None] * 4, "all_to_all") == [False] * 4
    one_node = Nodes.of_sizes((4,), range(4))
    assert votes(library, new_folder(), [None] * 4, "auto", nodes=one_node) == [False] * 4


def test_nvshmem_and_gin_are_for_gpus(caplog):
    caplog.set_level(logging.INFO, "magi_attention.comm")

    def main(t):
        for wish in ("nvshmem", "gin"):
            text = rf"={wish} cannot be done here: On rank 0 \(node 0\) tensors are on cpu"
            with pytest.raises(UnsupportedError, match=text):
                exchange_group(t, NODES, CPU, wish)
        assert exchange_group(t, NODES, CPU, "auto") is None
        assert "and NVSHMEM moves" in caplog.text and "and GIN moves" in caplog.text or t.rank

    FakeWorld(4).run(main)


class FakeNvshmem:
    """What a process knows of NVSHMEM; ``joined`` counts processes of one group."""

    built = loaded = (3, 4, 5)
    joined = 0

    def __init__(self) -> None:
        self.alloc = self.put = self.relay = self.wait = self.sum = self.end = lambda *args: 0

    @property
    def has_joined(self) -> bool:
        return FakeNvshmem.joined > 0

    def join(self, store, rank, world) -> None:
        FakeNvshmem.joined += 1

    def leave(self) -> None:
        FakeNvshmem.joined -= 1


def test_exchanges_over_other_nodes_of_a_group_share_nvshmem(monkeypatch):
    """It is joined once, and left with the last of them; another group cannot have it meanwhile."""
    monkeypatch.setattr(verbs, "Nvshmem", FakeNvshmem)
    device = torch.device("cuda")

    def main(t):
        t.store = None
        factories = [verbs.NvshmemFactory() for _ in range(2)]
        made = []
        for factory in factories:
            assert factory.why_not(t, device) is None
            made.append(factory.join(t, device))
        assert FakeNvshmem.joined == 1
        return made

    (made,) = FakeWorld(1).run(main)
    (reason,) = FakeWorld(1).run(lambda t: verbs.NvshmemFactory().why_not(t, device))
    assert "NVSHMEM has joined another group already" in reason
    for user, left in zip(made, (1, 0)):
        user.leave()
        assert FakeNvshmem.joined == left


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_memory_grows_with_plans_and_goes_with_the_group(library, new_folder):
    folder = new_folder()

    def main(t):
        factory = CpuFactory(library, folder).attach(t)
        group, sizes = exchange_group(t, NODES, CPU, "auto"), []
        verbs = factory.verbs
        assert (group.held_bytes, verbs.held) == (0, 0), "nothing before the first plan"
        for rows in (4, 64, 4):
            exchange, x = NodeExchange(group, plan_transfers(everybody(4, rows), NODES)), torch.ones(rows, 8)
            cast(exchange, [x])
            sizes.append(verbs.held)
            assert exchange.cache.nbytes > 0, "tables are counted"
        reduce(exchange, [torch.ones(12, 8)], [x], torch.float32)
        assert x.eq(4).all()
        assert sizes[0] < sizes[1] == sizes[2] < verbs.held == group.held_bytes == group.arena.num_bytes
        assert sizes[0] >= 4 * 8 * 4 * (1 + 2 + 3), "input, held and output"
        group.close()
        assert (group.held_bytes, verbs.held, verbs.has_left) == (0, 0, True)
        with pytest.raises(ContractError, match="given back"):
            cast(exchange, [x])

    FakeWorld(4).run(main)


# ---- a rank that dies -----------------------------------------------------------------------------------------------
CAST, REDUCE = ("put", "wait", "end"), ("put", "sum", "wait", "end")
TIMEOUT_S = 3.0


class Killed(Exception):
    pass


def spec_of(rank, world, sends, rows=4):
    """``sends[r]``: who needs the rows of rank r."""
    sources = [r for r in range(world) if rank in sends.get(r, ())]
    mine = ([rows], [sends[rank]]) if rank in sends else ([], [])
    return GroupSpec.make(rank, world, *mine, [rows] * len(sources), sources)


def die(library, folder, victim, when, specs, program, nodes=NODES, seed=0):
    """What the others say when a rank stops before a launch: ``when`` gets its verb and how often each was launched.
    ``program`` gets the rank, its group, and functions that cast and reduce and look at what comes."""
    plan, texts = plan_transfers(specs, nodes, 2), {}

    def main(t):
        factory, spec = CpuFactory(library, folder, seed).attach(t), specs[t.rank]
        exchange = NodeExchange(exchange_group(t, nodes, CPU, "nvshmem"), plan)
        rows = [torch.full((size, 8), 1.0 + source) for size, source in zip(spec.output_splits, spec.src_index)]
        arrived = torch.cat([torch.zeros(0, 8), *rows])

        def before(name):
            if t.rank == victim and when(name, factory.verbs.calls):
                raise Killed("its power went")

        factory.verbs.before = before

        def cast_rows():
            (out,) = cast(exchange, [torch.full((spec.input_rows, 8), 1.0 + t.rank)])
            assert torch.equal(out, arrived), "void rows are not given to others"

        def reduce_rows():
            back = torch.zeros(spec.input_rows, 8)
            reduce(exchange, [torch.ones(spec.output_rows, 8)], [back], torch.float32)
            assert back.eq(sum(map(len, spec.dst_indices))).all(), "nor are void sums"

        try:
            program(t.rank, exchange.group, cast_rows, reduce_rows)
        except PeerFailureError as error:
            texts[t.rank] = str(error)

    with pytest.raises(Killed):
        FakeWorld(nodes.world, TIMEOUT_S).run(main)
    return texts


def go_on(rank, group, cast, reduce):
    try:
        for _ in range(4):  # nobody goes further than one epoch without the others
            cast()
            reduce()
    except PeerFailureError as error:
        with pytest.raises(PeerFailureError, match=re.escape(str(error))):
            cast()  # the group is broken
        raise


PHASES = range(len(CAST + REDUCE))
DEATHS = [(phase % 4, phase) for phase in PHASES] + [(3 - phase % 4, phase) for phase in PHASES[::3]]


@pytest.fixture(scope="module")
def texts_of(library, tmp_path_factory):
    """Starts all worlds in which a rank dies at once, because they do nothing but wait; gives their texts by name."""
    nodes = Nodes.of_sizes((4, 1), range(5))
    reads_only = [spec_of(r, 4, {2: [1]}) for r in range(4)]  # rank 1 needs rows of rank 2 alone
    fans_out = [spec_of(r, 5, {4: [0, 1], 2: [0], 0: [3]}) for r in range(5)]

    def in_epoch_2(phase):
        return lambda name, calls: calls.total() > len(PHASES) + phase

    def before_the(verb, count):
        return lambda name, calls: (name, calls[name]) == (verb, count)

    worlds = {(v, phase): (v, in_epoch_2(phase), everybody(4, 5), go_on, NODES, phase) for v, phase in DEATHS}
    worlds["chain"] = 2, before_the("put", 1), reads_only, cast_once
    worlds["vain"] = 1, before_the("put", 2), fans_out, go_on_in_vain, nodes
    with ThreadPoolExecutor(len(worlds)) as pool:
        folders = [tmp_path_factory.mktemp("world") for _ in worlds]
        started = [pool.submit(die, library, folder, *world) for folder, world in zip(folders, worlds.values())]
        yield dict(zip(worlds, started))


def test_all_others_name_the_rank_that_died(texts_of):
    """In each phase of a cast and of a reduce."""
    for victim, phase in DEATHS:
        texts = texts_of[victim, phase].result()
        assert set(texts) == set(range(4)) - {victim}, (victim, phase)
        for rank, text in texts.items():
            named = f"Rank {victim} (node {victim // 2}) did not deliver within 3 s"
            assert text.startswith(named), (phase, rank, text)
            assert "It failed: Killed: its power went." in text, (phase, text)


def cast_once(rank, group, cast, reduce):
    cast()


def test_the_chain_of_waiting_ranks(texts_of):
    """Rank 1 needs rows of rank 2 alone, which rank 0 carries."""
    texts = texts_of["chain"].result()
    assert NODES.carrier(2, 0) == 0 and set(texts) == {0, 1}, "rank 3 waits for nobody"
    assert all(text.startswith("Rank 2 (node 1) did not deliver") for text in texts.values()), texts
    assert "This rank, 1, waits for rank 0 (node 0), which waits for rank 2 (node 1)." in texts[1]
    assert "This rank" not in texts[0]


def go_on_in_vain(rank, group, cast, reduce):
    """Rank 0 goes on after a failure without a look, as the host does before a GPU."""
    if rank == 0:
        group.check = group.check_if_done = lambda stage: None
    cast()
    if rank == 4:
        time.sleep(0.5)  # so that it still waits when rank 0 gives up
    reduce()
    for i in range(3):
        if rank:
            time.sleep(0.5 if (rank, i) == (2, 1) else 0)
            cast()
        else:
            with contextlib.suppress(AssertionError):  # void rows
                cast()
    if rank == 0:
        del group.check
        group.check("the end")


def test_a_rank_that_waited_in_vain_sends_nothing_any_more(texts_of):
    """Rank 1 dies in a reduce. Rank 0 adds its terms for rank 4: that rank, rank 3, which reads rows of rank 0, and
    rank 2, which only writes there, must notice."""
    texts = texts_of["vain"].result()
    assert set(texts) == {0, 2, 3, 4}
    for rank, text in texts.items():
        assert text.startswith("Rank 1 (node 0) did not deliver"), (rank, text)
        waits = f"This rank, {rank}, waits for rank 0 (node 0), which waits for rank 1 (node 0)."
        assert rank == 0 or waits in text, text
