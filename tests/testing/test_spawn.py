# SPDX-License-Identifier: Apache-2.0
"""run_processes: what ranks inherit, what comes back from them, and what is said when they fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from magi_attention.testing.spawn import RankFailure, run_processes
from magi_attention.testing.waiting import DEADLINE_S

NAME = "MAGI_TEST_OF_RANKS"
forks = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="only ranks on Linux without a CUDA device are forks"
)


def surroundings(rank: int, world: int) -> tuple:
    threads = next(line for line in Path(f"/proc/{os.getppid()}/status").read_text().splitlines() if "Threads" in line)
    return os.environ.get(NAME), os.getcwd(), os.getppid(), int(threads.split()[1]), torch.get_num_threads()


@forks
def test_ranks_are_forks_of_one_process_without_threads(monkeypatch, tmp_path) -> None:
    before = {**os.environ}
    first = run_processes(2, surroundings)
    assert before == {**os.environ}
    monkeypatch.setenv(NAME, "later")
    monkeypatch.chdir(tmp_path)
    second = run_processes(1, surroundings)
    assert [set_in for set_in, *_ in first + second] == [before.get(NAME)] * 2 + ["later"]
    assert [cwd for _, cwd, *_ in second] == [str(tmp_path)]
    assert len({server for _, _, server, *_ in first + second}) == 1
    assert {(threads, of_torch) for *_, threads, of_torch in first + second} == {(1, 1)}


def fails_on_1(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("lost mask")
    time.sleep(3600)


def test_the_traceback_is_shown_and_the_rest_is_killed() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 ---\nstill running.*rank 1.*KeyError: 'lost mask'"):
        run_processes(2, fails_on_1, grace_s=0.2)


def ends(rank: int, world: int) -> str:
    if rank == 0:
        os._exit(0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os._exit(7)
    return "done"


def test_a_rank_that_ends_without_a_report() -> None:
    with pytest.raises(RankFailure) as info:
        run_processes(3, ends, grace_s=DEADLINE_S)
    text = str(info.value)
    assert text.startswith("2 of 3 ranks failed.") and "rank 0" not in text
    assert "rank 1 ---\ndied with exit code -9" in text and "rank 2 ---\ndied with exit code 7" in text


def sleeps(rank: int, world: int) -> None:
    time.sleep(3600)


def test_a_rank_that_is_not_done_in_time() -> None:
    with pytest.raises(RankFailure, match=r"1 of 1 ranks failed(?s:.*)still running when time was up \(0\.1 s"):
        run_processes(1, sleeps, timeout_s=0.1)
