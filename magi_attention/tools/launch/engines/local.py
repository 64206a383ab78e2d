# SPDX-License-Identifier: Apache-2.0
"""Engine ``local``: every node is a process of this machine, with a torchrun of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from magi_attention.tools.launch.engines.node_command import DOCTOR, node_argv, token_of
from magi_attention.tools.launch.plan import LaunchPlan, Step, Target
from magi_attention.tools.launch.processes import MARK
from magi_attention.tools.launch.spec import LaunchSpec

IS_QUEUE = False
ADDRESS = "127.0.0.1"  # no fallback: all nodes of this engine are this machine
PACKAGE_PARENT = str(Path(__file__).resolve().parents[4])


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    title = f"up: session {session} on this machine"
    if not spec.preflight:
        return LaunchPlan(title, remark="processes need nothing made beforehand")
    argv = (spec.python or sys.executable, *DOCTOR)
    return LaunchPlan(title, (Step("doctor", argv, {"PYTHONPATH": PACKAGE_PARENT, **spec.environment}),))


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    steps = []
    for node in range(spec.nodes):
        argv = node_argv(
            spec,
            target,
            spec.python or sys.executable,
            ("--node-rank", str(node)),
            ("--master-addr", spec.rendezvous.address or ADDRESS),
            target.node_folder,
        )
        steps.append(Step(f"node {node}", argv, _environment(spec, target)))
    title = f"run {target.run_id}: {spec.nodes} nodes x {spec.ranks_per_node} ranks on this machine"
    return LaunchPlan(title, tuple(steps))


def _environment(spec: LaunchSpec, target: Target) -> dict[str, str]:
    paths = [PACKAGE_PARENT] + [p for p in [os.environ.get("PYTHONPATH")] if p and p != PACKAGE_PARENT]
    own = {"PYTHONPATH": os.pathsep.join(paths)}
    if "OMP_NUM_THREADS" not in os.environ:  # the nodes share the cores of one machine
        own["OMP_NUM_THREADS"] = str(max(num_cores() // spec.world_size, 1))
    return {**own, **spec.environment, **token_of(target), MARK: target.run_id}


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    steps = [step for target in targets for step in leftovers(spec, target).steps]
    return LaunchPlan(f"down: session {session}", tuple(steps))


def leftovers(spec: LaunchSpec, target: Target) -> LaunchPlan:
    """Ends what is left of a run on this machine."""
    argv = (sys.executable, "-m", "magi_attention.tools.launch.node", "--run-id", target.run_id)
    argv += ("--grace", str(spec.grace_s), "--sweep")
    step = Step(f"end what run {target.run} left here", argv, {"PYTHONPATH": PACKAGE_PARENT})
    return LaunchPlan(f"leftovers of run {target.run}", (step,))
