# SPDX-License-Identifier: Apache-2.0
"""Engine ``ssh``: node k is host k of a list. Hosts need the package (or docker and the image) and a key."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from magi_attention.launch.engines.node_command import (
    CONTAINER_LOGS,
    DOCTOR,
    container_name,
    docker_look,
    docker_run,
    node_argv,
)
from magi_attention.launch.plan import LaunchPlan, Step, Target
from magi_attention.launch.processes import MARK
from magi_attention.launch.spec import LaunchSpec

IS_QUEUE = False


def ssh_argv(spec: LaunchSpec, host: str, remote: str) -> tuple[str, ...]:
    """ssh without a terminal or a question; a connection that dies is noticed within a minute."""
    argv = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={spec.ssh.connect_timeout_s}"]
    argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    if spec.ssh.port:
        argv += ["-p", str(spec.ssh.port)]
    if spec.ssh.identity_file:
        argv += ["-i", spec.ssh.identity_file]
    if spec.ssh.user:
        argv += ["-l", spec.ssh.user]
    return (*argv, *spec.ssh.options, "--", host, remote)


def _in_workdir(spec: LaunchSpec, argv: Sequence[str]) -> str:
    """A line for the shell of the host; ``exec``, so that the shell does not stay in between."""
    change = f"cd {shlex.quote(spec.workdir)} && " if spec.workdir else ""
    return f"{change}exec {shlex.join(argv)}"


def _python(spec: LaunchSpec) -> str:
    return spec.python or ("python" if spec.container.image else "python3")


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    """One look at every distinct host."""
    steps = []
    for host in dict.fromkeys(spec.ssh.hosts[: spec.nodes]):
        if spec.container.image:
            pull = ["docker", "run", "--rm", "--entrypoint", "true", spec.container.image]
            argv = docker_look(spec) if spec.preflight else pull
            label = f"{host}: reach it and see that {spec.container.image} runs"
        else:
            argv = [_python(spec), *(DOCTOR if spec.preflight else ("-m", "magi_attention.launch.node", "--help"))]
            label = f"{host}: reach it and find the package"
        steps.append(Step(label, ssh_argv(spec, host, _in_workdir(spec, argv))))
    return LaunchPlan(f"up: session {session} on {len(steps)} hosts", tuple(steps))


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    head = spec.rendezvous.address or spec.ssh.hosts[0].rpartition("@")[2]
    steps = []
    for node, host in enumerate(spec.ssh.hosts[: spec.nodes]):
        in_container = bool(spec.container.image)
        folder = CONTAINER_LOGS if in_container else target.node_folder
        rank, address = ("--node-rank", str(node)), ("--master-addr", head)
        argv = list(node_argv(spec, target, _python(spec), rank, address, folder))
        if in_container:
            argv = docker_run(spec, target, node, spec.container.network or "host") + argv
            remote = f"exec {shlex.join(argv)}"
        else:
            pairs = [f"{name}={value}" for name, value in sorted(spec.environment.items())]
            remote = _in_workdir(spec, ["env", *pairs, f"{MARK}={target.run_id}", *argv])
        steps.append(Step(f"node {node} ({host})", ssh_argv(spec, host, remote)))
    title = f"run {target.run_id}: {spec.nodes} hosts x {spec.ranks_per_node} ranks over ssh, meeting at {head}"
    return LaunchPlan(title, tuple(steps), is_concurrent=True)


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    steps = [step for target in targets for step in leftovers(spec, target).steps]
    return LaunchPlan(f"down: session {session}", tuple(steps))


def leftovers(spec: LaunchSpec, target: Target) -> LaunchPlan:
    """Ends what a run left on its hosts."""
    steps = []
    for node, host in enumerate(spec.ssh.hosts[: spec.nodes]):
        if not spec.container.image and host in spec.ssh.hosts[:node]:
            continue  # one sweep ends all of a host
        if spec.container.image:
            argv, tolerated = ["docker", "rm", "--force", container_name(target, node)], "No such container"
        else:
            argv = [_python(spec), "-m", "magi_attention.launch.node", "--run-id", target.run_id]
            argv, tolerated = [*argv, "--grace", str(spec.grace_s), "--sweep"], ""
        label = f"{host}: end what run {target.run} left"
        steps.append(Step(label, ssh_argv(spec, host, _in_workdir(spec, argv)), tolerated=tolerated))
    return LaunchPlan(f"leftovers of run {target.run}", tuple(steps))
