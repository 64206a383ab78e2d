# SPDX-License-Identifier: Apache-2.0
"""How ranks whose tensors are on GPUs compare uses of plans: through the store, between threads here."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from magi_attention.comm.transport import consistency
from magi_attention.comm.transport.consistency import ConsistencyCheck, Use
from magi_attention.comm.transport.failure import FailureBoard
from magi_attention.comm.transport.progress import Sighting
from magi_attention.errors import PeerFailureError, PlanMismatchError
from magi_attention.testing.waiting import DEADLINE_S


def use_of(name: str) -> Use:
    return Use(name, lambda stage: {"call": stage, "plan": name}, lambda records: f"plans {records}", "attention")


class Group:
    """``world`` ranks, each a thread of its own."""

    def __init__(self, world: int) -> None:
        store = dist.HashStore()
        self.positions = [0] * world
        self.boards = [FailureBoard(store, r, range(world), self._position_of(r)) for r in range(world)]
        self.checks = [ConsistencyCheck(board, r) for r, board in enumerate(self.boards)]

    def _position_of(self, rank: int) -> Callable[[], int]:
        return lambda: self.positions[rank]

    def compare(self, rank: int, name: str, timeout_s: float = DEADLINE_S) -> None:
        self.checks[rank].compare(use_of(name), timeout_s)
        self.positions[rank] += 1  # it goes on to exchange data
        self.boards[rank].progress.count()

    def run(self, action: Callable[[int], object]) -> list[Exception | None]:
        """What each rank raises."""
        raised: list[Exception | None] = [None] * len(self.checks)

        def of_rank(rank: int) -> None:
            try:
                action(rank)
            except Exception as exc:
                raised[rank] = exc

        threads = [threading.Thread(target=of_rank, args=(r,), daemon=True) for r in range(len(self.checks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "hangs"
        return raised


@pytest.fixture
def hasty(monkeypatch):
    """A rank asks at once where the others are, as it does after seconds."""
    monkeypatch.setattr(consistency, "_ASK_S", 0.0)
    monkeypatch.setattr(ConsistencyCheck, "_wait", _without_first_second)


_wait = ConsistencyCheck._wait


def _without_first_second(self: ConsistencyCheck, waited_s: float, stage: str, timeout_s: float) -> None:
    _wait(self, waited_s + 1, stage, timeout_s + 1)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_equal_plans_are_never_told_of_others(hasty, monkeypatch, seed) -> None:
    """Whatever the timing: each rank pauses wherever it looks at others, as a process does that is not scheduled."""
    print("seed", seed)
    rng = random.Random(seed)
    group = Group(4)

    def paused(action):
        def call(*args):
            found = action(*args)
            time.sleep(rng.choice([0, 0, 0.002, 0.02]))
            return found

        return call

    for owner, name in ((ConsistencyCheck, "_missing"), (FailureBoard, "ahead"), (ConsistencyCheck, "_judge")):
        monkeypatch.setattr(owner, name, paused(getattr(owner, name)))

    def action(rank: int) -> None:
        for i in range(6):
            time.sleep(rng.choice([0, 0.01, 0.04]))
            group.compare(rank, f"plan {i}")

    assert group.run(action) == [None] * 4


def test_who_went_past_is_told(hasty) -> None:
    """Rank 1 has another plan than others, who know theirs, and exchange data."""
    group = Group(3)
    assert group.run(lambda rank: group.compare(rank, "known")) == [None] * 3

    def action(rank: int) -> None:
        if rank == 1:
            group.compare(rank, "new")
        else:
            group.positions[rank] += 1
            group.boards[rank].progress.count()

    raised = group.run(action)
    assert isinstance(raised[1], PlanMismatchError) and "rank 0, rank 2 went on" in str(raised[1])


def test_a_rank_that_ended_is_named_before_the_time_is_over(hasty, monkeypatch) -> None:
    group = Group(3)
    look = FailureBoard._look
    monkeypatch.setattr(
        FailureBoard, "_look", lambda self, rank: Sighting(0.0, is_alive=False) if rank == 2 else look(self, rank)
    )
    raised = group.run(lambda rank: None if rank == 2 else group.compare(rank, "plan"))
    for exc in raised[:2]:
        assert isinstance(exc, PeerFailureError) and "Rank 2 ended before attention" in str(exc), raised


def test_the_limit_names_who_is_missing(hasty) -> None:
    group = Group(3)
    raised = group.run(lambda rank: None if rank == 2 else group.compare(rank, "plan", 0.2))
    assert all(isinstance(exc, PeerFailureError) for exc in raised[:2])
    assert any("rank 2 did not arrive" in str(exc) for exc in raised[:2])


@pytest.mark.parametrize("seed", range(5))
def test_known_plans_in_another_order_are_told(monkeypatch, seed) -> None:
    """Plans that all ranks know, called in random order; one rank swaps two calls, or leaves one out."""
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr(consistency, "_INTERVAL", 8)
    group, world = Group(3), 3
    names = [f"plan {i}" for i in range(4)]
    calls = [rng.choice(names) for _ in range(64)]

    def follow(rank: int, calls: list[str]) -> None:
        for name in calls:
            time.sleep(rng.choice([0, 0, 0.001]))
            group.checks[rank].follow(use_of(name))

    assert group.run(lambda rank: follow(rank, calls)) == [None] * world
    odd, at = rng.randrange(world), rng.randrange(8, 40)
    other = list(calls)
    if seed % 2:
        del other[at]
        other.append(names[0])
    other[at] = next(name for name in names if name != calls[at])
    done = [0] * world

    def action(rank: int) -> None:
        for name in other if rank == odd else calls:
            group.checks[rank].follow(use_of(name))
            done[rank] += 1

    raised = group.run(action)
    told = [exc for exc in raised if exc is not None]
    assert told and all(isinstance(exc, PlanMismatchError) for exc in told), raised
    assert any("called differently" in str(exc) and "rank" in str(exc) for exc in told)
    # Who has found out raised within the interval; who has not begins no more than one further.
    assert min(done) < at + 8, (at, done)


def test_calls_before_a_comparison_are_part_of_it() -> None:
    group = Group(2)
    assert group.run(lambda rank: group.compare(rank, "plan")) == [None] * 2
    for rank in range(2):
        group.checks[rank].follow(use_of("plan" if rank else "other"))
    raised = group.run(lambda rank: group.compare(rank, "next"))
    assert all(isinstance(exc, PlanMismatchError) and "checksum" in str(exc) for exc in raised), raised


def test_a_store_that_is_gone_ends_no_training(caplog, monkeypatch) -> None:
    """The rank that holds the store may end first, when all is done."""
    monkeypatch.setattr(consistency, "_INTERVAL", 2)
    group = Group(2)
    check = group.checks[0]

    def gone(*_args):
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(group.boards[0], "_store", type("Gone", (), {"set": gone, "add": gone, "check": gone})())
    for _ in range(6):
        check.follow(use_of("plan"))
    assert caplog.text.count("compare their calls no more") == 1


def test_calls_alike_have_one_token_and_others_another() -> None:
    use = use_of("plan")
    others = [replace(use, varying="0.5"), use.of("backward"), use_of("other")]
    tokens = {use.token(False, ""), *(use.token(True, seed) for seed in ("", "seed 1", "seed 2"))}
    tokens |= {other.token(True, "") for other in others}
    assert len(tokens) == 7 and use.token(True, "") == use_of("plan").token(True, "")
    assert all(0 < token < 2**63 for token in tokens)
