# SPDX-License-Identifier: Apache-2.0
"""Engine local for real: two "nodes" of this machine, each with a torchrun of its own, and all that can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from launching import ROOT, SCRIPT, Magi, processes_of, wait_for_end

from magi_attention.testing.waiting import DEADLINE_S, wait_until

TWO_NODES = ("--nodes", "2", "--ranks-per-node", "2")


def unique(name: str) -> str:
    """A session name that no test running beside this one has, because processes are looked up by it."""
    return f"{name}-{os.getpid()}-{time.monotonic_ns() % 10**6}"


def test_two_nodes_of_two_ranks(magi):
    name = unique("two")
    words = ("--env", "GREETING=good day", "--env", "A_TOKEN=s3cr3t-words", "--", "hello", "a b")
    done = magi("run", SCRIPT, *TWO_NODES, "--name", name, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    for rank in range(4):
        assert f"[rank {rank}]: rank {rank} of 4 says hello ['a b'] good day" in done.stdout
        node = magi.folder(name) / f"node{rank // 2}"
        assert f"rank {rank} of 4" in (node / f"rank{rank}.out").read_text()
        assert (node / f"rank{rank}.err").read_text() == f"rank {rank} on stderr\n"
    assert done.stdout == magi.output(name)
    assert processes_of(name) == []

    only = magi("logs", name, "--rank", "3").stdout.splitlines()
    assert len(only) == 2 and all(line.startswith("[rank 3]: ") for line in only)
    assert len(magi("logs", name, "--node", "1", "--grep", "stderr").stdout.splitlines()) == 2
    for absent, told in ((("--rank", "9"), "ranks 0 to 3"), (("--node", "2"), "nodes 0 to 1")):
        done = magi("logs", name, *absent)
        assert done.returncode == 2 and told in done.stderr and done.stdout == "", done.stderr

    assert "s3cr3t-words" not in (magi.folder(name) / "run.json").read_text()
    facts = json.loads((magi.folder(name) / "run.json").read_text())
    assert facts["state"] == "done" and facts["exit_code"] == 0 and facts["world_size"] == 4
    assert facts["command"] == [SCRIPT, "hello", "a b"] and "--node-rank 1" in facts["plan"]
    assert set(facts["versions"]) >= {"magi_attention", "torch"}
    if shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        assert (facts["git"] or {}).get("commit", "") == head
    else:
        assert facts["git"] is None
    status = magi.status(name)
    assert status["state"] == "down" and [run["state"] for run in status["runs"]] == ["done"]


def test_a_port_in_use(magi):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = magi("run", SCRIPT, "--nodes", "2", "--port", str(port), "--name", "port", "--", "hello")
    assert done.returncode == 1 and f"Port {port} on" in done.stderr and "choose another with --port" in done.stderr
    assert "Address already in use" in done.stderr


def test_a_node_that_cannot_start(magi):
    done = magi("run", SCRIPT, "--nodes", "2", "--python", "/no/such/python", "--name", "gone", "--", "hello")
    assert done.returncode == 2 and "/no/such/python cannot be started" in done.stderr


def test_kill_9_of_the_launcher(magi):
    name = unique("k9")
    launcher = magi.start("run", SCRIPT, *TWO_NODES, "--name", name, "--", "wait")
    magi.wait_for(name, "says wait", 4)
    launcher.kill()
    launcher.wait()
    wait_for_end(name)
    assert "says wait" in magi.output(name)
    status = magi.status(name)
    assert status["runs"][0]["state"] == "lost" and "Its launcher ended" in status["runs"][0]["reason"]
    for _ in range(2):
        done = magi("down", name)
        assert done.returncode == 0 and "is down" in done.stdout, done.stderr
    assert magi.status(name)["state"] == "down" and "says wait" in magi("logs", name).stdout


@pytest.mark.nightly
def test_kill_9_of_everything_but_the_ranks(magi, tmp_path):
    """The worst case: nobody is left who could stop the ranks, and they do not react to SIGTERM."""
    name = unique("worst")
    launcher = magi.start("run", SCRIPT, "--name", name, "--grace", "2", "--", "stubborn", str(tmp_path))
    wait_until(lambda: (tmp_path / "ready0").exists(), "the rank is ready")
    pids = [launcher.pid, *pids_with(name, "launch.node"), *pids_with(name, "distributed.run")]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another one end
        for pid in pids:
            os.kill(pid, number)
    launcher.wait()
    wait_until(lambda: len(processes_of(name)) == 2, "only the rank and its child live on")
    status = magi.status(name)
    assert "2 processes that it left here were ended" in status["runs"][0]["reason"]
    assert processes_of(name) == []


def test_kill_9_of_a_node(magi, tmp_path):
    """The launcher sees it, says so, and ends what that node cannot end any more."""
    name = unique("node")
    launcher = magi.start("run", SCRIPT, "--name", name, "--grace", "2", "--", "stubborn", str(tmp_path))
    wait_until(lambda: (tmp_path / "ready0").exists(), "the rank is ready")
    (runner,) = [p for p in pids_with(name, "launch.node")]
    os.kill(runner, signal.SIGKILL)
    assert launcher.wait(timeout=DEADLINE_S) == 1 and processes_of(name) == []
    assert "Node 0 ended with signal SIGKILL (9)" in magi.status(name)["runs"][0]["reason"]


def pids_with(*words: str) -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(pid))
    return found


def test_ctrl_c_keeps_the_session(magi, tmp_path):
    name = unique("ctrlc")
    assert magi("up", "--name", name, "--grace", "2").returncode == 0
    launcher = magi.start("run", "--session", name, SCRIPT, "--", "wait")
    magi.wait_for(name, "says wait")
    second = magi("run", "--session", name, SCRIPT, "--", "hello")
    assert second.returncode == 2 and "is running something already" in second.stderr
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=DEADLINE_S) == 130
    assert processes_of(name) == []
    status = magi.status(name)
    assert status["state"] == "up" and [run["state"] for run in status["runs"]] == ["stopped"]
    assert magi("up", "--name", name).returncode == 2, "it is up already"
    # down from elsewhere, while a run that does not react to SIGTERM is on
    launcher = magi.start("run", "--session", name, SCRIPT, "--", "stubborn", str(tmp_path))
    wait_until(lambda: (tmp_path / "ready0").exists(), "the rank is ready")
    assert magi("down", name).returncode == 0
    assert launcher.wait(timeout=DEADLINE_S) == 130 and processes_of(name) == []
    refused = magi("run", "--session", name, SCRIPT, "--", "hello")
    assert refused.returncode == 2 and "is down" in refused.stderr
    assert magi("down", name, "--remove").returncode == 0 and not (magi.home / "sessions" / name).exists()
    assert magi("down", name).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=20m", "magi-test", str(folder)]
    if not shutil.which("mount") or subprocess.run(argv, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk):
    magi, name = Magi(small_disk), unique("full")
    done = magi("run", SCRIPT, "--name", name, "--", "fill")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "free space" in done.stderr
    assert processes_of(name) == [] and "says fill" in magi.output(name)
    assert magi.status(name)["runs"][0]["state"] == "failed"
    again = magi("run", SCRIPT, "--name", "again", "--", "hello")
    assert again.returncode in (1, 2) and ("No space left" in again.stderr or "MiB left" in again.stderr)
    assert magi("down", name, "--remove").returncode == 0


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = Magi(tmp_path / "file")("run", SCRIPT, "--", "hello")
    assert done.returncode == 2 and "set MAGI_HOME to a folder that is" in done.stderr


@pytest.mark.nightly
def test_the_example_over_two_nodes(magi, tmp_path):
    name, out = unique("llama"), tmp_path / "out"
    words = ("--out", str(out), "--steps", "2", "--seq-len", "256", "--max-document", "128")
    done = magi("run", "examples/llama/train.py", "--nodes", "2", "--name", name, "--", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads((out / "losses.json").read_text())
    assert result["world"] == 2 and len(result["losses"]) == 2 and result["device"] == "cpu"
