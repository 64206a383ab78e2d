# SPDX-License-Identifier: Apache-2.0
"""Engine ``slurm``: one sbatch script per run; srun starts the runner once per node, in a container by pyxis.

Secret variables are in a file beside the script, because Slurm keeps scripts and shows command lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from magi_attention.env import secrets
from magi_attention.errors import LaunchError
from magi_attention.tools.launch.engines.node_command import node_argv
from magi_attention.tools.launch.plan import LaunchPlan, RenderedFile, Step, Target, export_script
from magi_attention.tools.launch.processes import MARK
from magi_attention.tools.launch.rollcall import TOKEN
from magi_attention.tools.launch.spec import HEAD, LaunchSpec

IS_QUEUE = True
SECRETS = "secrets.env"  # in the run's folder
_PLAIN_WORD = re.compile(r"[A-Za-z0-9=/_.,:@%+-]*")


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    step = Step("see that this machine can submit", ("sbatch", "--version"))
    return LaunchPlan(f"up: session {session}, each run a job of Slurm", (step,))


def job_name(target: Target) -> str:
    return f"magi-{target.run_id}"


def directives(spec: LaunchSpec, target: Target) -> list[str]:
    """Options of sbatch as they stand behind #SBATCH. Those of the user are words of sbatch already."""
    own, gpus = spec.slurm, spec.gpus_per_node(spec.slurm.gpus_per_node)
    found = [f"--job-name={job_name(target)}", f"--nodes={spec.nodes}", "--ntasks-per-node=1"]
    found += [f"--time={own.time}", f"--output={_file_name(target.folder)}/output.log"]
    if own.exclusive:
        found.append("--exclusive")
    if gpus:
        found.append(f"--gpus-per-node={gpus}")
    if own.partition:
        found.append(f"--partition={own.partition}")
    if own.account:
        found.append(f"--account={own.account}")
    return [*map(_quoted, found), *own.directives]


def _quoted(word: str) -> str:
    """A word as sbatch reads it back."""
    if _PLAIN_WORD.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _file_name(path: str) -> str:
    """A path as Slurm's daemon reads it: it fills in what stands behind %, unless there is a backslash in it."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def srun_argv(spec: LaunchSpec, target: Target) -> list[str]:
    """srun of one runner per node; the first that fails ends the others."""
    argv = ["srun", f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1"]
    argv += ["--kill-on-bad-exit=1", "--unbuffered", "--export=ALL"]
    if spec.container.image:
        argv += [f"--container-image={spec.container.image}", "--no-container-mount-home"]
        mounts = [*spec.container.mounts, f"{target.folder}:{target.folder}"]  # the last for the logs of the ranks
        argv.append(f"--container-mounts={','.join(mounts)}")
        if spec.workdir:
            argv.append(f"--container-workdir={spec.workdir}")
        # Without this the image's own values win over those of the job.
        argv.append(f"--container-env={','.join(sorted([*spec.environment, HEAD, MARK, TOKEN]))}")
    elif spec.workdir:
        argv.append(f"--chdir={spec.workdir}")
    return argv


def script(spec: LaunchSpec, target: Target) -> str:
    """The sbatch script. Node 0 is found on the batch host, where scontrol is, and never guessed. A token for the
    nodes is made there, too, so that it stands in no file."""
    address = ("--master-addr", spec.rendezvous.address)
    if not spec.rendezvous.address:
        address = ("--master-addr-from", HEAD)
    runner = node_argv(
        spec,
        target,
        spec.python or ("python" if spec.container.image else "python3"),
        ("--node-rank-from", "SLURM_NODEID"),
        address,
        target.folder,
        watch_stdin=False,
    )
    plain, hidden = secrets.split(spec.environment)
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {line}" for line in directives(spec, target)), ""]
    lines += ["set -euo pipefail", f"folder={shlex.quote(target.folder)}", *_FINISH]
    if not spec.rendezvous.address:
        lines += _FIND_HEAD
    lines += export_script({**plain, MARK: target.run_id}).splitlines()
    lines += [f'source "${{folder}}/{SECRETS}"'] if hidden else []
    lines += [f"{TOKEN}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')", f"export {TOKEN}"]
    return "\n".join([*lines, "", shlex.join([*srun_argv(spec, target), *runner]), ""])


_FINISH = ('finish() { echo "$?" > "${folder}/exit_code"; }', "trap finish EXIT")
# The address is the one by which Slurm itself reaches the node, whose name need not resolve.
_FIND_HEAD = (
    'hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST}")',
    "host=${hosts%%$'\\n'*}",
    '[[ -n "${host}" ]] || { echo "Slurm named no host for this job." >&2; exit 2; }',
    'facts=" $(scontrol --oneliner show node "${host}") " || facts=""',
    "address=${facts#* NodeAddr=}",
    f"{HEAD}=${{host}}",
    f'[[ "${{address}}" == "${{facts}}" ]] || {HEAD}=${{address%% *}}',
    f"export {HEAD}",
)


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    if spec.container.image and set(target.folder) & set(",:"):
        raise LaunchError(
            f"The session folder {target.folder} has a comma or a colon, which separate the mounts of a container of "
            "Slurm; set MAGI_HOME to another folder."
        )
    path, hidden = f"{target.folder}/job.sbatch", secrets.split(spec.environment)[1]
    step = Step("submit", ("sbatch", "--parsable", path))
    title = f"run {target.run_id}: {spec.nodes} nodes x {spec.ranks_per_node} ranks as a job of Slurm"
    files = [RenderedFile(path, script(spec, target))]
    if hidden:
        files.append(RenderedFile(f"{target.folder}/{SECRETS}", export_script(hidden), is_secret=True))
    return LaunchPlan(title, (step,), tuple(files))


def status(spec: LaunchSpec, target: Target) -> Step:
    """Prints the state of the job, nothing once it has left the queue."""
    argv = ("squeue", "--noheader", "--name", job_name(target), "--format", "%T")
    return Step(f"queue state of run {target.run}", argv)


def logs(spec: LaunchSpec, target: Target, follow: bool = False) -> Step | None:
    return None  # the job writes output.log into the run's folder


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    steps = [Step(f"cancel run {t.run}", ("scancel", "--name", job_name(t))) for t in targets]
    return LaunchPlan(f"down: session {session}", tuple(steps))
