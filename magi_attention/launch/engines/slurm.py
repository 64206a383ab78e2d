# SPDX-License-Identifier: Apache-2.0
"""Engine ``slurm``: one sbatch script per run; srun starts the runner once per node, in a container by pyxis."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from magi_attention.launch.engines.node_command import node_argv
from magi_attention.launch.plan import LaunchPlan, RenderedFile, Step, Target
from magi_attention.launch.processes import MARK
from magi_attention.launch.spec import LaunchSpec

IS_QUEUE = True


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    step = Step("see that this machine can submit", ("sbatch", "--version"))
    return LaunchPlan(f"up: session {session}, each run a job of Slurm", (step,))


def job_name(target: Target) -> str:
    return f"magi-{target.run_id}"


def directives(spec: LaunchSpec, target: Target) -> list[str]:
    own = spec.slurm
    found = [f"--job-name={job_name(target)}", f"--nodes={spec.nodes}", "--ntasks-per-node=1"]
    found += [f"--time={own.time}", f"--output={target.folder}/output.log"]
    if own.exclusive:
        found.append("--exclusive")
    if own.gpus_per_node:
        found.append(f"--gpus-per-node={own.gpus_per_node}")
    if own.partition:
        found.append(f"--partition={own.partition}")
    if own.account:
        found.append(f"--account={own.account}")
    return [*found, *own.directives]


def srun_argv(spec: LaunchSpec, target: Target) -> list[str]:
    """srun of one runner per node; the first that fails ends the others."""
    argv = ["srun", f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1"]
    argv += ["--kill-on-bad-exit=1", "--unbuffered"]
    if spec.container.image:
        argv += [f"--container-image={spec.container.image}", "--no-container-mount-home"]
        mounts = [*spec.container.mounts, f"{target.folder}:{target.folder}"]  # the last for the logs of the ranks
        argv.append(f"--container-mounts={','.join(mounts)}")
        if spec.workdir:
            argv.append(f"--container-workdir={spec.workdir}")
        # Without this the image's own values win over those of the job.
        argv.append(f"--container-env={','.join(sorted([*spec.environment, MARK]))}")
    elif spec.workdir:
        argv.append(f"--chdir={spec.workdir}")
    return argv


def script(spec: LaunchSpec, target: Target) -> str:
    """The sbatch script. Node 0 is found on the batch host, where scontrol is, and never guessed."""
    head = shlex.quote(spec.rendezvous.address) if spec.rendezvous.address else ""
    runner = node_argv(
        spec,
        target,
        spec.python or ("python" if spec.container.image else "python3"),
        ("--node-rank-from", "SLURM_NODEID"),
        ("--master-addr", "@HEAD@"),
        target.folder,
        watch_stdin=False,
    )
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {line}" for line in directives(spec, target)), ""]
    lines += ["set -euo pipefail", f"trap 'echo $? > {shlex.quote(target.folder + '/exit_code')}' EXIT"]
    if head:
        lines.append(f"head={head}")
    else:
        lines.append('hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST}")')
        lines.append("head=${hosts%%$'\\n'*}")
        lines.append('[[ -n "${head}" ]] || { echo "Slurm named no host for this job." >&2; exit 2; }')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())]
    lines.append(f"export {MARK}={shlex.quote(target.run_id)}")
    command = shlex.join([*srun_argv(spec, target), *runner]).replace("@HEAD@", '"${head}"')
    return "\n".join([*lines, "", command, ""])


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    path = f"{target.folder}/job.sbatch"
    step = Step("submit", ("sbatch", "--parsable", path))
    title = f"run {target.run_id}: {spec.nodes} nodes x {spec.ranks_per_node} ranks as a job of Slurm"
    return LaunchPlan(title, (step,), (RenderedFile(path, script(spec, target)),))


def status(spec: LaunchSpec, target: Target) -> Step:
    """Prints the state of the job, nothing once it has left the queue."""
    argv = ("squeue", "--noheader", "--name", job_name(target), "--format", "%T")
    return Step(f"queue state of run {target.run}", argv)


def logs(spec: LaunchSpec, target: Target, follow: bool = False) -> Step | None:
    return None  # the job writes output.log into the run's folder


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    steps = [Step(f"cancel run {t.run}", ("scancel", "--name", job_name(t))) for t in targets]
    return LaunchPlan(f"down: session {session}", tuple(steps))
