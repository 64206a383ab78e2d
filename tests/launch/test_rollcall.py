# SPDX-License-Identifier: Apache-2.0
"""Strangers at the port where the nodes meet: they neither end a run nor make it wait."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from magi_attention.errors import LaunchError
from magi_attention.testing.waiting import DEADLINE_S, wait_until
from magi_attention.tools.launch import rollcall
from magi_attention.tools.launch.rollcall import NodeFacts
from magi_attention.tools.launch.service import free_port

TOKEN = "0123456789abcdef"


def facts(number: int, nodes: int = 2) -> NodeFacts:
    return NodeFacts("run-1", number, nodes, 1, f"host{number}", {"torch": "2"})


def line_of(token: str, role: str = "node", **changes) -> bytes:
    data = {"run_id": "run-1", "node": 1, "nodes": 2, "ranks_per_node": 1, "host": "h", "versions": {"torch": "2"}}
    return rollcall._seal(token, role, {**data, "nonce": "n", **changes})


class Meeting:
    """Node 0 in a thread."""

    def __init__(self, timeout_s: float, nodes: int = 2):
        self.port, self.said, self.outcome = free_port(), [], "still waiting"
        self.thread = threading.Thread(target=self._meet, args=(timeout_s, nodes), daemon=True)
        self.thread.start()
        self.connections: list[socket.socket] = []

    def _meet(self, timeout_s: float, nodes: int) -> None:
        try:
            rollcall.meet(facts(0, nodes), "127.0.0.1", self.port, timeout_s, TOKEN, self.said.append)
            self.outcome = "met"
        except LaunchError as error:
            self.outcome = str(error)
        except BaseException as error:  # noqa: B036 - a thread would print it only
            self.outcome = f"{type(error).__name__}: {error}"

    def knock(self, words: bytes) -> socket.socket:
        def is_there() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                self.connections.append(socket.create_connection(("127.0.0.1", self.port)))
                return True
            return False

        wait_until(is_there, "node 0 listens")
        with contextlib.suppress(OSError):  # it may hang up before the end
            self.connections[-1].sendall(words)
        return self.connections[-1]

    def arrive(self) -> str:
        """Node 1 comes, too; what became of node 0."""
        rollcall.meet(facts(1), "127.0.0.1", self.port, DEADLINE_S, TOKEN)
        return self.end()

    def end(self) -> str:
        self.thread.join(2 * DEADLINE_S)
        for connection in self.connections:
            connection.close()
        return self.outcome


STRANGERS = {
    "silent": b"",
    "part of a line": b"GET /",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no seal": json.dumps({"run_id": "run-1", "node": 1}).encode() + b"\n",
    "the run's id as its token": line_of("run-1"),
    "another token": line_of("f" * 16),
    "an answer as a question": line_of(TOKEN, role="head"),
    "text as a number": line_of("x", node="1", run_id="x\x1b[2J"),
    "deep JSON": b"[" * 60000 + b"\n",
    "no line, endless": b"x" * 300_000,
    "no UTF-8": b"\xff\xfe \x00\n",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_does_not_end_the_run(name):
    meeting = Meeting(DEADLINE_S)
    meeting.knock(STRANGERS[name])
    assert meeting.arrive() == "met"


def test_many_strangers_get_one_line():
    meeting = Meeting(DEADLINE_S)
    for words in STRANGERS.values():
        meeting.knock(words)
    for connection in meeting.connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: meeting.said, "node 0 says a word")
    assert meeting.arrive() == "met"
    assert meeting.said == ["dropped a connection from 127.0.0.1 that is not of this run"]


def test_strangers_do_not_move_the_deadline():
    meeting = Meeting(2)
    stop = threading.Event()
    slow = meeting.knock(b"")

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.2):
                slow.sendall(b" ")

    dripping = threading.Thread(target=drip)
    dripping.start()
    meeting.knock(line_of("y"))
    outcome = meeting.end()
    stop.set()
    dripping.join()
    assert outcome.startswith("Node 1 of 2 did not reach 127.0.0.1:") and "within 2 s (here: 0)" in outcome
    assert "not of this run: 1." in outcome


@pytest.mark.parametrize(
    "changes",
    [{"node": True}, {"versions": ["torch"]}, {"versions": {"torch": 2}}, {"host": "h\x1b[2J"}, {"nodes": None}],
)
def test_a_node_of_the_run_that_speaks_otherwise(changes, monkeypatch):
    """It knows the token, so it is ours: a sentence, and nothing of it reaches a terminal."""
    monkeypatch.setattr(rollcall, "_GOODBYE_S", 0.1)  # it does not listen to the answer
    meeting = Meeting(DEADLINE_S)
    meeting.knock(line_of(TOKEN, **changes))
    assert "another version of the roll call" in meeting.end() and "\x1b" not in meeting.outcome


def test_one_node_may_come_twice_and_two_may_not(monkeypatch):
    monkeypatch.setattr(rollcall, "_GOODBYE_S", 0.1)  # they do not listen to the answer
    meeting = Meeting(DEADLINE_S, 3)
    meeting.knock(line_of(TOKEN, nodes=3))
    meeting.knock(line_of(TOKEN, nodes=3))  # the same one, which lost its connection
    meeting.knock(line_of(TOKEN, nodes=3, nonce="another"))
    assert "node number 1 was given to two nodes" in meeting.end()


def test_a_stranger_in_the_place_of_node_0():
    """Node 1 takes no verdict from it, and goes on asking until node 0 is there."""
    replayed = line_of(TOKEN, role="head", nonce="of another start", refused="")
    answers = [b'{"refused": ""}\n', line_of("z", role="head"), replayed, b""]
    with rollcall.listen(0) as server:
        port, outcome = server.getsockname()[1], []
        node = threading.Thread(
            target=lambda: outcome.append(rollcall.meet(facts(1), "127.0.0.1", port, DEADLINE_S, TOKEN))
        )
        node.start()
        for answer in answers:
            connection, _ = server.accept()
            connection.sendall(answer)
            connection.close()
    rollcall.meet(facts(0), "127.0.0.1", port, DEADLINE_S, TOKEN, lambda text: None)
    node.join(DEADLINE_S)
    assert outcome == [None]


def test_something_else_answers_until_the_end():
    with rollcall.listen(0) as server:
        port, outcome = server.getsockname()[1], []

        def meet() -> None:
            with pytest.raises(LaunchError, match="what answers there is not node 0 of this run"):
                rollcall.meet(facts(1), "127.0.0.1", port, 0.5, TOKEN)
            outcome.append("told")

        node = threading.Thread(target=meet)
        node.start()
        server.settimeout(0.1)
        while node.is_alive():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()
        node.join()
        assert outcome == ["told"]


def test_the_token_is_never_sent():
    line = line_of(TOKEN)
    assert TOKEN.encode() not in line and line != line_of("f" * 16)


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a" * 70, "two..dots"])
def test_an_address_that_does_not_resolve(address):
    with pytest.raises(LaunchError, match=f"'{address}', where .* are to meet, does not resolve on .*--address"):
        rollcall.find_address(address, 0)


def test_an_address_that_is_no_other_machine():
    rollcall.see_own_port("127.0.0.1", free_port())
    with pytest.raises(LaunchError, match="does not lead to"):
        rollcall.see_own_port("255.255.255.255", free_port())  # never that of a machine
