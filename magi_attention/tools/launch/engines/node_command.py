# SPDX-License-Identifier: Apache-2.0
"""The command that every engine starts on a node, and the container around it."""

from __future__ import annotations

from collections.abc import Sequence

from magi_attention.env import secrets
from magi_attention.tools.launch.plan import Target
from magi_attention.tools.launch.processes import MARK
from magi_attention.tools.launch.rollcall import TOKEN
from magi_attention.tools.launch.spec import Container, LaunchSpec

SESSION_LABEL, RUN_LABEL = "com.magi.session", "com.magi.run"
CONTAINER_LOGS = "/tmp/magi-logs"
DOCTOR = ("-m", "magi_attention.cli", "doctor", "--quick", "--problems")


def node_argv(
    spec: LaunchSpec,
    target: Target,
    python: str,
    rank: Sequence[str],
    address: Sequence[str],
    log_dir: str,
    watch_stdin: bool = True,
    is_late_name: bool = False,
) -> tuple[str, ...]:
    """argv of the node runner. ``rank`` and ``address`` are options with their value, such as ``--node-rank 1`` or
    ``--node-rank-from SLURM_NODEID``. ``is_late_name``: the address may resolve only once node 0 is there."""
    argv = [python, "-m", "magi_attention.tools.launch.node", "--run-id", target.run_id]
    argv += ["--nodes", str(spec.nodes), *rank, "--ranks-per-node", str(spec.ranks_per_node)]
    argv += [*address, "--master-port", str(spec.port), "--timeout", str(spec.rendezvous.timeout_s)]
    argv += ["--grace", str(spec.grace_s)]
    if is_late_name and not spec.rendezvous.address:
        argv += ["--resolve-timeout", str(spec.rendezvous.timeout_s)]
    if spec.max_restarts:
        argv += ["--max-restarts", str(spec.max_restarts)]
    argv += ["--log-dir", log_dir]
    if watch_stdin:
        argv += ["--watch-stdin"]
    return (*argv, "--", *spec.command)


def container_name(target: Target, node: int) -> str:
    return f"magi-{target.run_id}-node{node}"


def container_flags(container: Container) -> list[str]:
    """Rights of a container, each for a reason; together they replace ``--privileged``."""
    flags = ["--shm-size", container.shm_size]  # NCCL and CUDA IPC between the ranks of a node
    flags += ["--ulimit", "stack=67108864"]  # deep stacks of compilers
    if container.gpus != "none" or container.rdma:
        flags += ["--ulimit", "memlock=-1"]  # pinned memory; a daemon without that right refuses it
    if container.gpus == "all":
        flags += ["--gpus", "all"]
    elif container.gpus != "none":
        flags += ["--gpus", f'"device={container.gpus}"']  # docker reads the value as CSV, hence the quotes
    if container.rdma:
        flags += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"]  # verbs as an ordinary user
    if container.nvshmem:
        flags += ["--cap-add", "SYS_PTRACE"]  # passing memory handles between processes
    for mount in container.mounts:
        flags += ["--volume", mount]
    return [*flags, *container.flags]


def token_of(target: Target) -> dict[str, str]:
    """The variable by which the nodes of a run know one another."""
    return {TOKEN: target.token} if target.token else {}


def docker_variables(spec: LaunchSpec, target: Target | None = None) -> dict[str, str]:
    """Variables of a container that docker takes from its own environment, because argv is no place for secrets."""
    return {**secrets.split(spec.environment)[1], **(token_of(target) if target else {})}


def place_flags(spec: LaunchSpec, target: Target | None = None) -> list[str]:
    """Environment and working folder of a container; of ``docker_variables`` the names alone."""
    flags = []
    for name, value in sorted(secrets.split(spec.environment)[0].items()):
        flags += ["--env", f"{name}={value}"]
    for name in sorted(docker_variables(spec, target)):
        flags += ["--env", name]
    return flags + (["--workdir", spec.workdir] if spec.workdir else [])


def docker_look(spec: LaunchSpec, extra: Sequence[str] = ()) -> list[str]:
    """The doctor in a container with the rights that a node has."""
    argv = ["docker", "run", "--rm", *container_flags(spec.container), *extra, *place_flags(spec)]
    return [*argv, spec.container.image, spec.python or "python", *DOCTOR]


def docker_run(spec: LaunchSpec, target: Target, node: int, network: str, extra: Sequence[str] = ()) -> list[str]:
    """``docker run`` of one node, up to and including the image, for a shell with ``docker_variables``. Standard input
    stays open, so that the node sees when the launcher is gone."""
    argv = ["docker", "run", "--rm", "--interactive", "--init", "--name", container_name(target, node)]
    argv += ["--label", f"{SESSION_LABEL}={target.session}", "--label", f"{RUN_LABEL}={target.run_id}"]
    argv += ["--network", network, *container_flags(spec.container), *extra]
    argv += ["--env", f"{MARK}={target.run_id}", *place_flags(spec, target)]
    return [*argv, spec.container.image]
