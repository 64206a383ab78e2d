# SPDX-License-Identifier: Apache-2.0
"""The nodes meet before torchrun starts, so that a missing or wrong one is named within the timeout.

Static rendezvous itself waits without a word. Node 0 listens at the master port; every other node connects and
sends one line; when all are there, node 0 answers each with its verdict and frees the port for torchrun.

The port is open to whoever reaches the machine. Each line therefore carries a seal that only those can make who know
the token of the run, which never crosses the network itself. What has no such seal is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from magi_attention.errors import LaunchError

TOKEN = "MAGI_RUN_TOKEN"  # the variable that hands a node the token
_LINE_BYTES = 65536
_MORE_PENDING = 256  # connections that may be silent at once, beside one of every node
_RETRY_S = 0.2
_CONNECT_S = 5.0
_GOODBYE_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself. ``versions`` maps packages to versions and must be equal on all nodes."""

    run_id: str
    node: int
    nodes: int
    ranks_per_node: int
    host: str
    versions: dict[str, str]


def disagreement(head: NodeFacts, other: NodeFacts) -> str | None:
    """Why two nodes cannot run together, or None."""
    for name in ("nodes", "ranks_per_node"):
        mine, theirs = getattr(head, name), getattr(other, name)
        if mine != theirs:
            return f"node 0 was started with {name} {mine}, node {other.node} ({other.host}) with {theirs}."
    for name in sorted({*head.versions, *other.versions}):
        mine, theirs = head.versions.get(name, "missing"), other.versions.get(name, "missing")
        if mine != theirs:
            return (
                f"{name} is {mine} on node 0 ({head.host}) and {theirs} on node {other.node} ({other.host}); install "
                "the same version on every node, or use one image."
            )
    return None


def meet(facts: NodeFacts, address: str, port: int, timeout_s: float, token: str = "", say: Say = print) -> None:
    """Returns on every node once all have arrived and agree. Without a ``token`` the run's id has to do.

    Raises:
        LaunchError: the port is taken, the address cannot be used, a node is missing or another one disagrees.
    """
    token = token or facts.run_id
    if facts.node == 0:
        _receive(facts, address, port, timeout_s, token, say)
    else:
        _report(facts, address, port, timeout_s, token)


def listen(port: int) -> socket.socket:
    """A listening socket at the master port of this machine; ``LaunchError`` if it is taken."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno)
        raise LaunchError(
            f"Port {port} on {socket.gethostname()} cannot be used for the rendezvous ({why}); stop what "
            "listens there (`ss -ltnp` shows it) or choose another with --port."
        ) from None


def see_own_port(address: str, port: int) -> None:
    """``LaunchError`` if this machine cannot listen at the port, or does not reach it by the address of node 0."""
    with listen(port):
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            raise LaunchError(
                f"{address}:{port}, where the ranks are to meet, does not lead to {socket.gethostname()}, the node "
                f"0 ({error}); correct --address (rendezvous.address)."
            ) from None


def find_address(address: str, timeout_s: float) -> None:
    """``LaunchError`` if the address of node 0 does not resolve here within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no host name"
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"{address!r}, where the ranks are to meet, does not resolve on {socket.gethostname()} ({why}); "
                "correct --address (rendezvous.address), or give an IP address."
            )
        time.sleep(_RETRY_S)


# ---- lines with a seal ----------------------------------------------------------------------------------


def _seal(token: str, role: str, data: dict) -> bytes:
    """A line; ``role`` is node or head, so that none can be sent back as an answer to itself."""
    body = json.dumps(data).encode()
    return _proof(token, role, body) + b" " + body + b"\n"


def _proof(token: str, role: str, body: bytes) -> bytes:
    return hmac.new(token.encode(), role.encode() + b" " + body, hashlib.sha256).hexdigest().encode()


def _unseal(token: str, role: str, line: bytes) -> dict | None:
    """What a line holds; None if whoever wrote it does not know the token. Only then is it read at all."""
    proof, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(proof, _proof(token, role, body)):
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _facts_of(data: dict) -> NodeFacts | None:
    """What a node said of itself, if it has the shape that this version sends."""
    kinds = {"run_id": str, "node": int, "nodes": int, "ranks_per_node": int, "host": str, "versions": dict}
    if any(type(data.get(name)) is not kind for name, kind in kinds.items()):
        return None
    texts = [data["host"], *data["versions"], *data["versions"].values()]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        return None
    return NodeFacts(**{name: data[name] for name in kinds})


# ---- node 0 ---------------------------------------------------------------------------------------------


class _Door:
    """The listening socket, and whoever has connected and not yet sent a whole line. None of them holds up others."""

    def __init__(self, server: socket.socket, token: str, capacity: int, say: Say):
        self.num_dropped = 0
        self._server, self._token, self._capacity, self._say = server, token, capacity, say
        self._pending: dict[socket.socket, bytearray] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def close(self) -> None:
        for connection in self._pending:
            connection.close()
        self._selector.close()

    def next(self, deadline: float) -> tuple[dict, socket.socket] | None:
        """The next line of a node of this run and its connection; None at the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._server:
                    self._accept()
                elif (data := self._read(key.fileobj)) is not None:
                    return data, key.fileobj
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # why: it is gone again
        connection.setblocking(False)
        self._pending[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._pending) > self._capacity:
            self._drop(next(iter(self._pending)))

    def _read(self, connection: socket.socket) -> dict | None:
        """What a whole line of a node holds. Strangers are dropped."""
        if connection not in self._pending:
            return None  # why: dropped since the selector saw it
        try:
            chunk = connection.recv(_LINE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        line = self._pending[connection]
        line += chunk
        if b"\n" in chunk and len(line) <= _LINE_BYTES:
            data = _unseal(self._token, "node", bytes(line[: line.index(b"\n")]))
            if data is not None:
                self._forget(connection)
                return data
        elif chunk and len(line) <= _LINE_BYTES:
            return None  # the rest may still come
        self._drop(connection)
        return None

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:  # one line, however many there are
            with contextlib.suppress(OSError):
                host = connection.getpeername()[0].removeprefix("::ffff:")
                self._say(f"dropped a connection from {host} that is not of this run")
        self._forget(connection)
        connection.close()


def _receive(facts: NodeFacts, address: str, port: int, timeout_s: float, token: str, say: Say) -> None:
    deadline = time.monotonic() + timeout_s
    arrived: dict[int, tuple[str, socket.socket]] = {}  # node -> its nonce and connection
    with listen(port) as server:
        door = _Door(server, token, facts.nodes + _MORE_PENDING, say)
        try:
            while len(arrived) < facts.nodes - 1:
                found = door.next(deadline)
                if found is None:
                    raise LaunchError(_missing(facts, sorted(arrived), address, port, timeout_s, door.num_dropped))
                data, connection = found
                nonce, other = str(data.get("nonce")), _facts_of(data)
                reason = _objection(facts, other, nonce, arrived)
                if reason:
                    _answer([(nonce, connection)], reason, token)
                    raise LaunchError(f"The nodes do not fit together: {reason}")
                if other.node in arrived:  # it lost its first connection
                    arrived[other.node][1].close()
                arrived[other.node] = (nonce, connection)
        except LaunchError as error:
            _answer(list(arrived.values()), str(error), token)
            raise
        finally:
            door.close()
    # why after the listening socket is closed: torchrun of node 0 needs the port next
    _answer(list(arrived.values()), "", token)


def _objection(facts: NodeFacts, other: NodeFacts | None, nonce: str, arrived: dict) -> str | None:
    if other is None:
        return "a node speaks another version of the roll call; install the same magi_attention on every node."
    if reason := disagreement(facts, other):
        return reason
    if not 0 < other.node < facts.nodes:
        return f"there is a node number {other.node}; with {facts.nodes} nodes it is 0 to {facts.nodes - 1}."
    if other.node in arrived and arrived[other.node][0] != nonce:
        return f"node number {other.node} was given to two nodes."
    return None


def _missing(facts: NodeFacts, arrived: list[int], address: str, port: int, timeout_s: float, num_dropped: int) -> str:
    missing = [str(n) for n in range(1, facts.nodes) if n not in arrived]
    here = ", ".join(map(str, [0, *arrived]))
    strangers = f" Connections that were not of this run: {num_dropped}." if num_dropped else ""
    return (
        f"Node {', '.join(missing)} of {facts.nodes} did not reach {address}:{port} within {timeout_s:g} s (here: "
        f"{here}). See that it was started, that it resolves and reaches that address (firewall, "
        f"rendezvous.address), or raise rendezvous.timeout_s.{strangers}"
    )


def _answer(to: list[tuple[str, socket.socket]], reason: str, token: str) -> None:
    """Tells the nodes the verdict: ``reason`` why they cannot run, empty if they can."""
    deadline = time.monotonic() + _GOODBYE_S
    for nonce, connection in to:
        with contextlib.suppress(OSError):  # why: that node is gone; torchrun will say so
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            connection.sendall(_seal(token, "head", {"nonce": nonce, "refused": reason}))
            connection.shutdown(socket.SHUT_WR)
    for _, connection in to:
        with contextlib.suppress(OSError):
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            connection.recv(1)  # the other side closes first, so that the port is not left in TIME_WAIT here
        connection.close()


# ---- the other nodes ------------------------------------------------------------------------------------


def _report(facts: NodeFacts, address: str, port: int, timeout_s: float, token: str) -> None:
    """Asks node 0 until it answers: at first it may not be there, or something else may be."""
    deadline = time.monotonic() + timeout_s
    nonce = secrets.token_hex(8)
    line = _seal(token, "node", {**asdict(facts), "nonce": nonce})
    while True:
        is_stranger, why = False, ""
        try:
            refused = _ask(line, nonce, address, port, deadline, token)
            is_stranger = refused is None
        except OSError as error:
            refused, why = None, str(error)
        if refused:
            raise LaunchError(refused)
        if refused == "":
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_S)
    if is_stranger:
        raise LaunchError(
            f"Node {facts.node} ({facts.host}) reached {address}:{port}, but what answers there is not node 0 of "
            "this run, or it ended. Its log says why; else choose another --port."
        )
    raise LaunchError(
        f"Node {facts.node} ({facts.host}) could not reach node 0 at {address}:{port} within "
        f"{timeout_s:g} s ({why}). See that node 0 was started and that the address and port are "
        "right and open, or set rendezvous.address."
    )


def _ask(line: bytes, nonce: str, address: str, port: int, deadline: float, token: str) -> str | None:
    """Node 0's verdict, None if it is not node 0 that answers; ``OSError`` if nobody can be reached."""
    connect_s = max(min(deadline - time.monotonic(), _CONNECT_S), 0.1)
    with socket.create_connection((address, port), timeout=connect_s) as connection:
        deadline += _GOODBYE_S  # node 0 speaks at its own deadline, which may be a little later
        answer = bytearray()
        try:
            connection.sendall(line)
            while b"\n" not in answer and len(answer) <= _LINE_BYTES:
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                if not (chunk := connection.recv(4096)):
                    break
                answer += chunk
        except OSError:
            return None
    data = _unseal(token, "head", bytes(answer.partition(b"\n")[0])) or {}
    return data["refused"] if data.get("nonce") == nonce and isinstance(data.get("refused"), str) else None
