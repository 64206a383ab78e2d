# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when ranks wait for one another outside the messages of their group: what the store says."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from magi_attention.comm.transport.failure import FailureBoard
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.comm.transport.waits import chain_of_waits
from magi_attention.testing.spawn import RankFailure, run_processes
from magi_attention.testing.waiting import DEADLINE_S, Flags, wait_until


def boards(world: int) -> list[FailureBoard]:
    store = dist.HashStore()
    return [FailureBoard(store, rank, range(world), lambda: 0) for rank in range(world)]


def test_the_last_of_the_chain_that_reported_ends_it_at_once():
    first, second, third, _ = boards(4)
    third.report("ValueError: no such row.")
    assert second.follow(lambda: [2], "a cast", 1e6) == ([2], " It reported: ValueError: no such row.")
    assert first.follow(lambda: [1], "a cast", 1e6) == ([1, 2], " It reported: ValueError: no such row.")


@pytest.mark.parametrize("kind", ["own", "lost", "late"])
def test_any_report_ends_the_chain_at_once(kind):
    first, second, _ = boards(3)
    second.report("Rank 2 did not arrive.", kind)
    assert first.follow(lambda: [1], "a cast", 1e6) == ([1], " It reported: Rank 2 did not arrive.")


def test_a_rank_that_says_nothing_has_until_the_timeout():
    first, second, _ = boards(3)
    chain, about = first.follow(lambda: [1], "a cast", 0.05)
    assert chain == [1] and about.startswith(" Rank 1 is alive")
    second.follow(lambda: [2], "a cast", 0.05)
    assert first.follow(lambda: [1], "a cast", 0.05)[0] == [1, 2]


def test_ranks_that_wait_in_a_circle():
    first, second, third = boards(3)
    for board, awaited in ((first, [1]), (second, [2]), (third, [0])):
        chain, _ = board.follow(awaited.copy, "a cast", 0.05)
    assert chain == [0, 1, 2]


def test_ranks_that_wait_for_one_another_and_for_a_third():
    """Such a circle hides nobody, also if a rank learns later that it waits for the third."""
    first, second, third = boards(3)
    third.report("ValueError: no such row.")
    answers = iter([[1]] * 3)
    assert second.follow(lambda: [0, 2], "a cast", 1e6)[0] == [2]
    assert first.follow(lambda: next(answers, [1, 2]), "a cast", 1e6)[0] == [1, 2]
    assert first.follow(lambda: [1, 2], "a cast", 1e6)[0] == [2]


SILENT = None  # what a rank has told that has told nothing


@pytest.mark.parametrize("waits, gone, want", [
    ([[1], SILENT], [], [1]),
    ([[1], SILENT], [1], [1]),
    ([[1, 2], [0, 2], SILENT], [], [2]),
    ([[1], [0, 2], SILENT], [], [1, 2]),
    ([[1, 2], [3], SILENT, SILENT], [3], [1, 3]),  # a rank that is gone, before one that is silent and nearer
    ([[1, 2], [3], [3], SILENT], [], [1, 3]),
    ([[1], [2], [0]], [], [1, 2, 0]),  # all wait
    ([[1], [0], SILENT], [2], [1, 0]),  # nobody waits for rank 2
])  # fmt: skip
def test_chains(waits, gone, want):
    found, is_known = chain_of_waits(waits[0], waits.__getitem__, gone.__contains__)
    assert found == want and is_known == (want[-1] in gone)


def test_ranks_that_waited_in_vain_are_not_gone():
    first, second, third, fourth = boards(4)
    assert first.gone() == []
    second.report("Rank 3 did not deliver.", "lost")
    third.report("Rank 3 did not arrive.", "late")
    assert first.gone() == []
    fourth.report("ValueError: no such row.")
    assert first.gone() == [3] and fourth.gone() == []


def wait_for_one_that_waits(rank: int, world: int, folder: str) -> None:
    transport, flags = TorchTransport(timeout_s=60), Flags(folder)
    transport.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(transport._board.gone, "rank 2 is gone")
    suspect, about = transport.suspect(1 - rank, "a cast")
    flags.set(f"rank {rank}")
    flags.wait("rank 0", "rank 1")  # an end of this process is not what the other one shall see
    assert suspect == 2 and f"Rank {1 - rank} is alive" in about and "its process has ended" in about, about


def test_a_rank_that_was_killed_is_suspected_before_one_that_waits(tmp_path):
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 2 ---\ndied with exit code -9"):
        run_processes(3, wait_for_one_that_waits, str(tmp_path), grace_s=DEADLINE_S)


def lose_the_store(rank: int, world: int) -> tuple[list[int], str]:
    transport = TorchTransport(timeout_s=60)

    def gone(*args):
        raise RuntimeError("Connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport._board, "_write", gone)
        return transport.blame(lambda: [1 - rank], "a cast")


def test_without_the_store_the_rank_that_was_awaited_is_named():
    for rank, (chain, about) in enumerate(run_processes(2, lose_the_store)):
        assert chain == [1 - rank] and "The store of this group is gone, too" in about
