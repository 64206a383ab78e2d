# SPDX-License-Identifier: Apache-2.0
"""The command that every engine starts on a node, and the container around it."""

from __future__ import annotations

from collections.abc import Sequence

from magi_attention.launch.plan import Target
from magi_attention.launch.spec import Container, LaunchSpec

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
) -> tuple[str, ...]:
    """argv of the node runner. ``rank`` and ``address`` are options with their value, such as ``--node-rank 1`` or
    ``--node-rank-from SLURM_NODEID``."""
    argv = [python, "-m", "magi_attention.launch.node", "--run-id", target.run_id]
    argv += ["--nodes", str(spec.nodes), *rank, "--ranks-per-node", str(spec.ranks_per_node)]
    argv += [*address, "--master-port", str(spec.port), "--timeout", str(spec.rendezvous.timeout_s)]
    argv += ["--grace", str(spec.grace_s)]
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


def place_flags(spec: LaunchSpec) -> list[str]:
    """Environment and working folder of a container."""
    flags = []
    for name, value in sorted(spec.environment.items()):
        flags += ["--env", f"{name}={value}"]
    return flags + (["--workdir", spec.workdir] if spec.workdir else [])


def docker_look(spec: LaunchSpec, extra: Sequence[str] = ()) -> list[str]:
    """The doctor in a container with the rights that a node has."""
    argv = ["docker", "run", "--rm", *container_flags(spec.container), *extra, *place_flags(spec)]
    return [*argv, spec.container.image, spec.python or "python", *DOCTOR]


def docker_run(spec: LaunchSpec, target: Target, node: int, network: str, extra: Sequence[str] = ()) -> list[str]:
    """``docker run`` of one node, up to and including the image. Standard input stays open, so that the node sees
    when the launcher is gone."""
    argv = ["docker", "run", "--rm", "--interactive", "--init", "--name", container_name(target, node)]
    argv += ["--label", f"{SESSION_LABEL}={target.session}", "--label", f"{RUN_LABEL}={target.run_id}"]
    argv += ["--network", network, *container_flags(spec.container), *extra]
    argv += ["--env", f"MAGI_RUN_ID={target.run_id}", *place_flags(spec)]
    return [*argv, spec.container.image]
