# SPDX-License-Identifier: Apache-2.0
"""Engine ``docker``: every node is a container of this machine; they share a bridge network of the session."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

from magi_attention.tools.launch.engines.node_command import (
    SESSION_LABEL,
    container_name,
    docker_look,
    docker_run,
    docker_variables,
    node_argv,
)
from magi_attention.tools.launch.plan import LaunchPlan, Step, Target
from magi_attention.tools.launch.spec import LaunchSpec

IS_QUEUE = False
LOGS = "/var/log/magi"  # the run's folder inside the containers


def network_name(spec: LaunchSpec, session: str) -> str:
    return spec.container.network or f"magi-{session}"


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    image = spec.container.image
    if spec.preflight:
        look = docker_look(spec, ["--user", f"{os.getuid()}:{os.getgid()}"])
        label = f"doctor in {image}, which is pulled if it is not here"
        steps = [Step(label, tuple(look), docker_variables(spec))]
    else:
        argv = ("docker", "run", "--rm", "--entrypoint", "true", image)
        steps = [Step(f"see that {image} is here, or pull it", argv)]
    if not spec.container.network:
        argv = ("docker", "network", "create", "--label", f"{SESSION_LABEL}={session}", network_name(spec, session))
        steps.append(Step("network of the session", argv, tolerated="already exists"))
    return LaunchPlan(f"up: session {session} in containers of this machine", tuple(steps))


def image_digest(spec: LaunchSpec) -> Step:
    argv = ("docker", "image", "inspect", "--format", "{{.Id}} {{json .RepoDigests}}", spec.container.image)
    return Step("which image it is", argv)


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    network = network_name(spec, target.session)
    extra = ["--user", f"{os.getuid()}:{os.getgid()}", "--mount", _mount(target.folder, LOGS)]
    # With the host's network there is nothing to find by name: all nodes are this machine.
    head = "127.0.0.1" if network == "host" else container_name(target, 0)
    steps = []
    for node in range(spec.nodes):
        argv = node_argv(
            spec,
            target,
            spec.python or "python",
            ("--node-rank", str(node)),
            ("--master-addr", spec.rendezvous.address or head),
            LOGS,
            is_late_name=network != "host",
        )
        argv = (*docker_run(spec, target, node, network, extra), *argv)
        steps.append(Step(f"node {node}", argv, docker_variables(spec, target)))
    title = f"run {target.run_id}: {spec.nodes} containers x {spec.ranks_per_node} ranks on this machine"
    return LaunchPlan(title, tuple(steps))


def _mount(source: str, where: str) -> str:
    """A value for ``--mount``, which docker reads as CSV: a path may hold a colon or a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={source}", f"target={where}"])
    return line.getvalue()


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    steps = [step for target in targets for step in leftovers(spec, target).steps]
    if not spec.container.network:
        argv = ("docker", "network", "rm", network_name(spec, session))
        steps.append(Step("network of the session", argv, tolerated="not found"))
    return LaunchPlan(f"down: session {session}", tuple(steps))


def leftovers(spec: LaunchSpec, target: Target) -> LaunchPlan:
    """Ends the containers of a run."""
    names = tuple(container_name(target, node) for node in range(spec.nodes))
    argv = ("docker", "rm", "--force", *names)
    step = Step(f"containers of run {target.run}", argv, tolerated="No such container")
    return LaunchPlan(f"leftovers of run {target.run}", (step,))
