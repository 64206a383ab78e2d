# SPDX-License-Identifier: Apache-2.0
"""Engine ``ssh``: node k is host k of a list. Hosts need the package (or docker and the image) and a key.

Variables go over the standard input of ssh: neither here nor there do they stand in a command line.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from magi_attention.tools.launch.engines.node_command import (
    CONTAINER_LOGS,
    DOCTOR,
    container_name,
    docker_look,
    docker_run,
    docker_variables,
    node_argv,
    token_of,
)
from magi_attention.tools.launch.plan import LaunchPlan, Step, Target
from magi_attention.tools.launch.processes import MARK
from magi_attention.tools.launch.spec import LaunchSpec

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


def _step(
    spec: LaunchSpec, label: str, host: str, argv: Sequence[str], workdir: str, variables: Mapping[str, str], **more
) -> Step:
    """``argv`` on a host, with ``variables``; ``exec``, so that no shell stays in between. sh runs the line, whatever
    the shell of the account is."""
    line = f"cd -- {shlex.quote(workdir)} && exec {shlex.join(argv)}" if workdir else f"exec {shlex.join(argv)}"
    step = Step(label, (), exports=variables, **more)
    if step.stdin:  # so many bytes are the script; what follows is for the program
        line = f'eval "$(head -c {len(step.stdin)})" && {line}'
    return dataclasses.replace(step, argv=ssh_argv(spec, host, f"exec sh -c {shlex.quote(line)}"))


def _python(spec: LaunchSpec) -> str:
    return spec.python or ("python" if spec.container.image else "python3")


def _workdir(spec: LaunchSpec) -> str:
    """The shell on a host has it; a container's is docker's business."""
    return "" if spec.container.image else spec.workdir


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    """One look at every distinct host."""
    steps = []
    for host in dict.fromkeys(spec.ssh.hosts[: spec.nodes]):
        if spec.container.image:
            pull = ["docker", "run", "--rm", "--entrypoint", "true", spec.container.image]
            argv = docker_look(spec) if spec.preflight else pull
            label, variables = f"{host}: reach it and see that {spec.container.image} runs", docker_variables(spec)
        else:
            ask = DOCTOR if spec.preflight else ("-m", "magi_attention.tools.launch.node", "--help")
            argv = [_python(spec), *ask]
            label, variables = f"{host}: reach it and find the package", spec.environment
        steps.append(_step(spec, label, host, argv, _workdir(spec), variables))
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
            variables = docker_variables(spec, target)
        else:
            variables = {**spec.environment, **token_of(target), MARK: target.run_id}
        steps.append(_step(spec, f"node {node} ({host})", host, argv, _workdir(spec), variables))
    title = f"run {target.run_id}: {spec.nodes} hosts x {spec.ranks_per_node} ranks over ssh, meeting at {head}"
    return LaunchPlan(title, tuple(steps))


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
            argv = [_python(spec), "-m", "magi_attention.tools.launch.node", "--run-id", target.run_id]
            argv, tolerated = [*argv, "--grace", str(spec.grace_s), "--sweep"], ""
        label = f"{host}: end what run {target.run} left"
        steps.append(_step(spec, label, host, argv, _workdir(spec), {}, tolerated=tolerated))
    return LaunchPlan(f"leftovers of run {target.run}", tuple(steps))
