# SPDX-License-Identifier: Apache-2.0
"""What one process learns of another one that answers nobody."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from magi_attention.comm.transport.progress import Progress, describe, look
from magi_attention.testing.waiting import wait_until

OTHER = """
import sys
from magi_attention.comm.transport.progress import Progress
p = Progress()
before = p.begin("attention forward")
p.count()
p.end(before)
print(p.address, flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(not Progress().address, reason="this system has no memfd_create")


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_seen_alive_and_then_gone(other) -> None:
    address, own = other.stdout.readline().strip(), Progress()
    own.count(), own.count()
    own.begin("attention backward")
    seen = look(address)
    assert seen.is_alive and (seen.stage, seen.collectives) == ("attention forward", 1) and seen.ended_ago is not None
    text = describe("rank 1", seen, None, own)
    assert text.startswith(
        "Rank 1 is alive and has not begun attention backward; its last call on this group was attention forward, "
        "which ended "
    ), text
    other.kill()
    wait_until(lambda: not look(address).is_alive, "it is gone; a zombie counts as ended, so nobody waits for it")
    text = describe("rank 1", look(address), seen, own)
    assert text.startswith("When last seen, ") and "rank 1 had not begun attention backward" in text, text
    assert text.endswith("its process has ended since."), text
    assert describe("rank 1", look(address), None, own) == "Rank 1 is gone: its process has ended."


@pytest.mark.parametrize("seed", range(5))
def test_the_innermost_call_is_shown_and_the_outer_one_again_after_it(seed: int) -> None:
    print("seed", seed)
    rng, page, open_calls, last = random.Random(seed), Progress(), [], ""
    for step in range(500):
        if open_calls and rng.random() < 0.5:
            stage, before = open_calls.pop()
            page.end(before)
            last = stage if before is None else open_calls[-1][0]
        else:
            last = f"call {rng.randrange(100)}"  # more names than there is room for at once
            open_calls.append((last, page.begin(last)))
        if len(open_calls) > 3:
            continue  # names of outer calls may be written over by then
        seen = look(page.address)
        assert seen.is_alive and page.stage == (seen.stage if open_calls else "")
        assert (seen.ended_ago is None) == bool(open_calls)
        if len(open_calls) == 1 and seen.stage != last:
            pytest.fail(f"step {step}: {seen.stage} instead of {last}")


def test_words_for_each_state() -> None:
    own, other = Progress(), Progress()
    own.count()
    own.begin("roll")
    assert "has made no call on this group yet" in describe("rank 2", look(other.address), None, own)
    other.begin("roll")
    assert "is in the same call, roll, which it began 0.0 s ago" in describe("rank 2", look(other.address), None, own)
    other.count(), other.count()
    assert "is further on, in roll" in describe("rank 2", look(other.address), None, own)
    assert "another host" in describe("rank 2", None, None, own)
    assert look("") is None and look('["elsewhere", 1, 1, 3]') is None
