# SPDX-License-Identifier: Apache-2.0
"""The nodes meet before torchrun starts, so that a missing or wrong one is named within the timeout.

Static rendezvous itself waits without a word. Node 0 listens at the master port; every other node connects and
sends one line of JSON; when all are there, node 0 answers each with its verdict and frees the port for torchrun.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from magi_attention.errors import LaunchError

_LINE_BYTES = 65536
_RETRY_S = 0.2


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
    if other.run_id != head.run_id:
        return f"node {other.node} ({other.host}) belongs to run {other.run_id}, not to {head.run_id}."
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


def meet(facts: NodeFacts, address: str, port: int, timeout_s: float) -> None:
    """Returns on every node once all have arrived and agree.

    Raises:
        LaunchError: the port is taken, the address cannot be used, a node is missing or another one disagrees.
    """
    if facts.node == 0:
        _receive(facts, address, port, timeout_s)
    else:
        _report(facts, address, port, timeout_s)


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


def _receive(facts: NodeFacts, address: str, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    arrived: dict[int, tuple[NodeFacts, socket.socket]] = {}
    with listen(port) as server:
        try:
            while len(arrived) < facts.nodes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise LaunchError(_missing(facts, sorted(arrived), address, port, timeout_s)) from None
                other = _read_facts(connection)
                if other is None:  # why: something else knocked, such as a port scan
                    connection.close()
                    continue
                reason = disagreement(facts, other)
                if reason is None and (other.node in arrived or not 0 < other.node < facts.nodes):
                    reason = f"node number {other.node} was given to two nodes, or is not below {facts.nodes}."
                if reason:
                    _answer(connection, reason)
                    raise LaunchError(f"The nodes do not fit together: {reason}")
                arrived[other.node] = (other, connection)
        except LaunchError as error:
            for _, connection in arrived.values():
                _answer(connection, str(error))
            raise
    # why after the listening socket is closed: torchrun of node 0 needs the port next
    for _, connection in arrived.values():
        _answer(connection, "")


def _missing(facts: NodeFacts, arrived: list[int], address: str, port: int, timeout_s: float) -> str:
    missing = [str(n) for n in range(1, facts.nodes) if n not in arrived]
    here = ", ".join(map(str, [0, *arrived]))
    return (
        f"Node {', '.join(missing)} of {facts.nodes} did not reach {address}:{port} within {timeout_s:g} s (here: "
        f"{here}). See that it was started, that it resolves and reaches that address (firewall, "
        "rendezvous.address), or raise rendezvous.timeout_s."
    )


def _read_facts(connection: socket.socket) -> NodeFacts | None:
    connection.settimeout(5)
    try:
        with connection.makefile("rb") as file:
            return NodeFacts(**json.loads(file.readline(_LINE_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _answer(connection: socket.socket, reason: str) -> None:
    try:
        connection.sendall(json.dumps({"refused": reason}).encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the other side closes first, so that the port is not left in TIME_WAIT here
    except OSError:
        pass  # why: that node is gone; torchrun will say so
    finally:
        connection.close()


def _report(facts: NodeFacts, address: str, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    connection, reason = None, ""
    while connection is None:
        try:
            connection = socket.create_connection((address, port), timeout=5)
        except OSError as error:
            reason = str(error)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node {facts.node} ({facts.host}) could not reach node 0 at {address}:{port} within "
                    f"{timeout_s:g} s ({reason}). See that node 0 was started and that the address and port are "
                    "right and open, or set rendezvous.address."
                ) from None
            time.sleep(_RETRY_S)
    with connection:
        connection.sendall(json.dumps(asdict(facts)).encode() + b"\n")
        connection.settimeout(max(deadline - time.monotonic(), 1) + 5)
        try:
            with connection.makefile("rb") as file:
                line = file.readline(_LINE_BYTES)
            refused = json.loads(line)["refused"]
        except (OSError, ValueError, KeyError, TypeError):
            raise LaunchError(
                f"Node {facts.node} ({facts.host}) reached {address}:{port}, but what answers there is not node 0 of "
                "this run, or it ended. Its log says why; else choose another --port."
            ) from None
    if refused:
        raise LaunchError(refused)
