# SPDX-License-Identifier: Apache-2.0
"""Engines: pure functions from a spec to a ``LaunchPlan``. They start nothing and look nothing up.

Every engine module has ``up`` (what makes or checks what runs need), ``run`` and ``down``. Engines that start the
nodes themselves have ``leftovers``, for a run whose nodes did not end in good order. Engines whose ``run`` hands a
job to a queue have ``status`` and ``logs`` instead; their ``IS_QUEUE`` is True.
"""

from __future__ import annotations

from types import ModuleType

from magi_attention.tools.launch.engines import docker, k8s, local, slurm, ssh

TABLE: dict[str, ModuleType] = {"local": local, "docker": docker, "ssh": ssh, "slurm": slurm, "k8s": k8s}


def engine_of(name: str) -> ModuleType:
    return TABLE[name]
