# SPDX-License-Identifier: Apache-2.0
"""`magi doctor` and `magi collect-env`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magi_attention.cli import launch
from magi_attention.cli.common import ROOT, UsageError
from magi_attention.env import secrets
from magi_attention.tools.doctor import finding, group_checks, registry
from magi_attention.tools.doctor.finding import Finding
from magi_attention.tools.doctor.system import System
from magi_attention.tools.launch import provenance, service, session
from magi_attention.tools.launch.engines import k8s, slurm
from magi_attention.tools.launch.plan import LaunchPlan
from magi_attention.tools.launch.textfile import open_private

PAIRWISE = ["-m", "magi_attention.benchmarking.collective"]
_SHOWN = ("MAGI_", "NCCL_", "NVSHMEM_", "TORCH", "CUDA_", "NVIDIA_", "GLOO_", "OMP_", "LD_", "SLURM_", "PYTHONPATH")


def command_doctor(args: argparse.Namespace) -> int:
    level = registry.STATIC if args.static else registry.QUICK if args.quick else registry.FULL
    if given := [o for o in launch.launch_options_given(args) if not args.pairwise]:
        raise UsageError(f"{', '.join(given)} says where to launch, which only --pairwise does.")
    if args.dry_run:
        for check in registry.checks_of(level):
            print(f"  {check.id:6} {check.title}")
        return launch.launch(args, PAIRWISE, "doctor") if args.pairwise else 0
    system = registry.NoGpus() if args.static else System()
    findings = registry.examine(system, level)
    code = finding.EXIT_OK
    if args.pairwise:
        more = pairwise(args)
        if more is None:
            code = finding.EXIT_NOT_RUN
        else:
            findings = [f for f in findings if f.check not in {m.check for m in more}] + more
    print(finding.as_json(findings) if args.json else finding.as_text(findings, args.problems), end="")
    return code or finding.exit_code(findings, args.strict)


def choose_ranks(args: argparse.Namespace, gpus: int) -> None:
    """One rank per GPU, or per node without GPUs; two nodes, but one where these would be this machine twice.

    NCCL refuses two ranks on one GPU.
    """
    args.ranks_per_node = args.ranks_per_node or max(gpus, 1)
    args.nodes = args.nodes or (1 if gpus and args.engine in (None, "local") else 2)


def pairwise(args: argparse.Namespace) -> list[Finding] | None:
    """Findings over all ranks of a launch; None if the ranks did not get that far, which was told."""
    if not args.session and not args.spec:
        choose_ranks(args, len(System().gpus))
    is_own = not args.session
    made = None
    try:
        if is_own:
            spec = launch.spec_from(args)
            service.with_command(spec, PAIRWISE)
            made = service.up(spec, launch.new_name(args, "doctor"), launch.say, is_implicit=True)
        else:
            made = session.read_session(args.session)
        if service.engine_of(made.spec.engine).IS_QUEUE:
            raise UsageError(
                f"--pairwise waits for its ranks, which engine {made.spec.engine} does not; "
                f"`magi run` with the same options and `-- {' '.join(PAIRWISE)}` submits the same."
            )
        current, outcome = service.run(made, PAIRWISE, launch.say, show=False)
        log = (current.folder / "output.log").read_text(encoding="utf-8", errors="replace")
        data = group_checks.parse_output(log)
        if outcome.exit_code or data is None:
            launch.say(f"the ranks did not finish: {outcome.reason}\n  {current.folder / 'output.log'}")
            return None
        return group_checks.group_findings(data)
    finally:
        if is_own and made is not None:
            service.down(made, lambda text: None)


# ---- collect-env ----------------------------------------------------------------------------------------


def shown_environment() -> dict[str, str]:
    """Variables that matter here; values of those that may be secrets are left out."""
    return {n: secrets.shown(n, v) for n, v in sorted(os.environ.items()) if n.startswith(_SHOWN)}


def collected() -> dict[str, Any]:
    """What a bug report needs, as plain values."""
    system = System()
    findings = registry.examine(system, registry.QUICK)
    return {
        "collected": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **provenance.facts([secrets.shown_argument(word) for word in sys.argv]),
        "installed_from": str(ROOT),
        "torch_cuda": system.torch_cuda(),
        "libraries": {name: "loads" if why is None else why for name, (_, why) in system.native_libraries().items()},
        "nvidia_smi": system.run(["nvidia-smi"]) or "nvidia-smi is not here or fails",
        "topology": system.run(["nvidia-smi", "topo", "-m"], 30) or "",
        "environment": shown_environment(),
        "doctor": [asdict(f) for f in findings],
    }


def run_files(name: str, number: str | None) -> tuple[Path, list[Path]]:
    """Folder of a run and the files of it that tell what happened, rendered manifests and logs."""
    current = session.find_run(session.read_session(name), number)
    wanted, left_out = {".json", ".log", ".sbatch", ".out", ".err"}, {k8s.SECRETS, slurm.SECRETS}
    files = (p for p in current.folder.rglob("*") if p.suffix in wanted and p.name not in left_out)
    return current.folder, sorted(p for p in files if p.is_file())


def command_collect_env(args: argparse.Namespace) -> int:
    if not args.session and (args.run or args.output):
        option = "--run" if args.run else "--output"
        raise UsageError(f"{option} is about a session's run; name the session with --session, or leave {option} out.")
    folder, files = run_files(args.session, args.run) if args.session else (None, [])
    if args.dry_run:
        print(LaunchPlan("collect-env: versions, GPUs, environment, quick doctor").text(), end="")
        for path in files:
            print(path)
        return 0
    text = json.dumps(collected(), indent=1)
    if folder is None:
        print(text)
        return 0
    out = Path(args.output or f"magi-{args.session}-{folder.name}.tar.gz")
    hide = secrets.hider(session.read_session(args.session).spec.environment)
    try:
        with open(open_private(out), "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            _add(archive, "environment.json", hide(text), time.time())
            for path in files:
                content = path.read_text(encoding="utf-8", errors="surrogateescape")
                _add(archive, str(path.relative_to(folder)), hide(content), path.stat().st_mtime)
    except OSError as error:
        raise UsageError(
            f"{error.filename or out} cannot be used ({error.strerror}); free space there, or name another place for "
            "the archive with --output."
        ) from None
    print(out)
    return 0


def _add(archive: tarfile.TarFile, name: str, text: str, seconds: float) -> None:
    data = text.encode("utf-8", "surrogateescape")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(seconds), 0o600
    archive.addfile(entry, io.BytesIO(data))
