# SPDX-License-Identifier: Apache-2.0
"""A line that a rank writes in pieces comes out whole, with one prefix."""

from __future__ import annotations

import io
import os
import random
import re
import threading

import pytest

from magi_attention.tools.launch.torchrun import WholeLines

# flush and a pause between the pieces of a line, as a slow disk or a busy machine makes it
IN_PIECES = """
import os, sys, time
for line in range(6):
    for piece in ("begin ", str(line), " of [rank 9]: middle", " end", chr(10)):
        os.write(1 + line % 2, piece.encode())
        time.sleep(0.04)
os.write(1, b"without an end")
"""


@pytest.mark.parametrize("seed", range(5))
def test_threads_with_pieces_of_lines(seed):
    rng = random.Random(seed)
    print(f"{seed=}")
    stream = io.StringIO()
    whole = WholeLines(stream, threading.Lock())
    wanted = {f"[rank {rank}]: " + "x" * rng.randrange(1, 60) + f" {rank} {i}" for rank in range(4) for i in range(50)}

    def follow(rank: int, seed: int) -> None:
        rng = random.Random(seed)
        prefix = f"[rank {rank}]: "
        for line in sorted(line for line in wanted if line.startswith(prefix)):
            rest = line[len(prefix) :] + "\n"
            while rest:
                size = rng.randrange(1, len(rest) + 1)
                assert whole.write(prefix + rest[:size]) == len(prefix) + size
                rest = rest[size:]

    threads = [threading.Thread(target=follow, args=(rank, rng.random())) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(wanted) and set(lines) == wanted
    whole.write("[rank 1]: and no more")
    whole.finish()
    assert stream.getvalue().splitlines()[len(wanted) :] == ["[rank 1]: and no more"]


@pytest.mark.parametrize("of_torch", ["", "[rank1]: "])
def test_a_traceback_comes_in_one_piece(of_torch):
    """Whatever another thread passes on between its lines, and in whatever pieces these come."""
    traceback = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: NaN"]
    stream, lock = io.StringIO(), threading.Lock()
    out, err = WholeLines(stream, lock), WholeLines(stream, lock)
    for line in ["[rank 1]: before", *(f"[rank 1]: {of_torch}{line}" for line in traceback), "[rank 1]: behind"]:
        err.write(line[:15])
        out.write("[rank 1]: printed\n")
        err.write(f"[rank 1]: {line[15:]}\n")
    lines = [line.removeprefix("[rank 1]: ").removeprefix(of_torch) for line in stream.getvalue().splitlines()]
    start = lines.index(traceback[0])
    assert lines[start : start + 3] == traceback and lines.count("printed") == 5
    assert lines[-1] == "behind" and lines.count("before") == 1
    err.write(f"[rank 1]: {traceback[0]}\n")  # of a rank that was killed while it wrote
    err.finish()
    assert stream.getvalue().endswith(f"{traceback[0]}\n")


def test_ranks_that_write_in_pieces(magi, tmp_path):
    script = tmp_path / "pieces.py"
    script.write_text(IN_PIECES)
    name = f"pieces-{os.getpid()}"
    done = magi("run", str(script), "--ranks-per-node", "2", "--no-preflight", "--name", name)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r"\[rank \d\]", line)]
    said = [*(f"begin {line} of [rank 9]: middle end" for line in range(6)), "without an end"]
    assert sorted(lines) == sorted(f"[rank {rank}]: {words}" for rank in range(2) for words in said)
