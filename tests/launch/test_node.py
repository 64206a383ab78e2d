# SPDX-License-Identifier: Apache-2.0
"""The node runner and the roll call, without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from launching import ROOT, SCRIPT

from magi_attention.errors import LaunchError
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.tools.launch import node, processes, rollcall
from magi_attention.tools.launch.rollcall import NodeFacts
from magi_attention.tools.launch.service import free_port

VERSIONS = {"magi_attention": "1", "torch": "2"}


def facts(number, nodes=3, run_id="r", **changes):
    return NodeFacts(run_id, number, nodes, changes.pop("ranks_per_node", 2), f"host{number}", {**VERSIONS, **changes})


def meet_all(all_facts, timeout_s=DEADLINE_S):
    """The error of each node, None where it went through."""
    port, errors = free_port(), {}

    def one(index, mine):
        try:
            rollcall.meet(mine, "127.0.0.1", port, timeout_s)
            errors[index] = None
        except LaunchError as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=one, args=(i, f)) for i, f in enumerate(all_facts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    return [errors.get(i, "still waiting") for i in range(len(all_facts))]


def test_all_arrive_and_the_port_is_free_afterwards():
    assert meet_all([facts(0), facts(1), facts(2)]) == [None, None, None]
    port = free_port()
    for _ in range(2):  # a second time, which fails where the first left the port in TIME_WAIT
        arguments = [(facts(n), "127.0.0.1", port, DEADLINE_S) for n in range(3)]
        threads = [threading.Thread(target=rollcall.meet, args=args) for args in arguments]
        [thread.start() for thread in threads]
        [thread.join(2 * DEADLINE_S) for thread in threads]
        assert not any(thread.is_alive() for thread in threads)
        rollcall.listen(port).close()


def test_a_missing_node_is_named_everywhere():
    for timeout_s in (1, 8, 64):  # longer where node 2, too, was late
        head, other = meet_all([facts(0), facts(2)], timeout_s)
        if "(here: 0, 2)" in head:
            break
    assert "Node 1 of 3 did not reach 127.0.0.1" in head and "(here: 0, 2)" in head
    assert other == head


def test_a_missing_head_is_named():
    (alone,) = meet_all([facts(1)], timeout_s=0.5)
    assert "Node 1 (host1) could not reach node 0 at 127.0.0.1" in alone and "Connection refused" in alone


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (facts(1, 2, torch="3"), "torch is 2 on node 0 (host0) and 3 on node 1 (host1)"),
        (facts(1, 2, ffa="1"), "ffa is missing on node 0"),
        (facts(1, 4), "started with nodes 2, node 1 (host1) with 4"),
        (facts(1, 2, ranks_per_node=8), "ranks_per_node 2, node 1 (host1) with 8"),
        (facts(5, 2), "node number 5"),
    ],
)
def test_nodes_that_do_not_fit(other, words):
    errors = meet_all([facts(0, 2), other])
    assert any(words in error for error in errors if error), errors
    assert all(errors[:1])


def test_two_heads():
    port = free_port()
    with rollcall.listen(port), pytest.raises(LaunchError, match=f"Port {port} on .* cannot be used"):
        rollcall.meet(facts(0, 2), "127.0.0.1", port, DEADLINE_S)


def resolved(*words):
    return node.resolve(node.parser().parse_args(["--run-id", "x", *words]))


def test_what_the_environment_holds(monkeypatch):
    monkeypatch.setenv("NODE", "1")
    monkeypatch.setenv("HEAD", "host0")
    args = resolved("--nodes", "2", "--node-rank-from", "NODE", "--master-addr-from", "HEAD", "--", "a.py", "--b")
    assert (args.node_rank, args.master_addr, args.command) == (1, "host0", ["a.py", "--b"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--node-rank-from", "NOWHERE", "--", "a"), "NOWHERE is not set"),
        (("--nodes", "2", "--master-addr-from", "NOWHERE", "--", "a"), "NOWHERE is not set"),
        (("--nodes", "2", "--", "a"), "Several nodes need --master-addr"),
        (("--nodes", "2", "--node-rank", "2", "--", "a"), "it is 0 to 1"),
        (("--node-rank-from", "WORDS", "--", "a"), "must be the number of this node"),
        ((), "There is no command"),
    ],
)
def test_nothing_is_guessed(words, sentence, monkeypatch):
    monkeypatch.setenv("WORDS", "two")
    with pytest.raises(LaunchError, match=sentence):
        resolved(*words)


def test_no_room_for_logs(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="Logs cannot be written"):
        node.prepare_folder(str(tmp_path / "file"), 0)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    with pytest.raises(LaunchError, match="has 1.0 MiB left; free at least 16 MiB"):
        node.prepare_folder(str(tmp_path), 0)


def test_the_runner_stops_when_its_input_ends(tmp_path):
    """While the nodes still meet, too: nothing may wait for a launcher that is gone."""
    argv = [sys.executable, "-m", "magi_attention.tools.launch.node", "--run-id", "alone", "--nodes", "2"]
    argv += ["--watch-stdin", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--", SCRIPT]
    runner = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert "host" not in runner.stdout.readline()[:4]
    assert runner.poll() is None
    runner.stdin.close()
    assert runner.wait(timeout=DEADLINE_S) == node.STOPPED


def test_marked_processes_are_found_and_ended():
    run_id = f"mark-{os.getpid()}"
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
    code += "time.sleep(3600)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, processes.MARK: mark}, stdout=subprocess.PIPE)
        for mark in (run_id, f"{run_id}/0", f"{run_id}/1", f"{run_id}x")
    ]
    for child in children:
        child.stdout.readline()
    try:
        assert processes.marked_processes(f"{run_id}/1") == [children[2].pid]
        assert processes.marked_processes(run_id) == sorted(child.pid for child in children[:3])
        assert sorted(processes.stop_marked(run_id, 0.2)) == sorted(child.pid for child in children[:3])
        assert processes.marked_processes(run_id) == [] and children[3].poll() is None
        started = processes.start_time(children[3].pid)
        assert started is not None and processes.start_time(children[0].pid) is None
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
