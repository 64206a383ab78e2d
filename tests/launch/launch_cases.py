# SPDX-License-Identifier: Apache-2.0
"""Specs of every engine, and their plans."""

from __future__ import annotations

from magi_attention.tools.launch.engines import engine_of
from magi_attention.tools.launch.plan import LaunchPlan, Target
from magi_attention.tools.launch.spec import LaunchSpec, check_spec
from magi_attention.tools.launch.toml import build

TARGET = Target("s1", "001", "s1-001-abcdef", "/home/me/.magi/sessions/s1/runs/001", "~/.magi/sessions/s1/runs/001")
IMAGE = "registry.example/team/magi@sha256:" + "0" * 64
COMMAND = ["train.py", "--data", "two words", "--out", "$HOME/x"]
BASE = {"nodes": 2, "ranks_per_node": 8, "command": COMMAND, "environment": {"NCCL_DEBUG": "INFO", "TEXT": "it's a b"}}
CONTAINER = {"image": IMAGE, "mounts": ["/data:/data:ro", "/out:/out"], "rdma": True, "nvshmem": True}
CASES: dict[str, dict] = {
    "local": {**BASE, "engine": "local", "rendezvous": {"port": 29611}, "max_restarts": 1},
    "docker": {**BASE, "engine": "docker", "container": CONTAINER, "workdir": "/workspace"},
    "docker-cpu": {**BASE, "engine": "docker", "preflight": False, "container": {"image": IMAGE, "gpus": "none"}},
    "docker-gpus": {**BASE, "engine": "docker", "container": {"image": IMAGE, "gpus": "0,1", "network": "host"}},
    "ssh": {
        **BASE,
        "engine": "ssh",
        "workdir": "/srv/my code",
        "rendezvous": {"address": "10.0.0.1", "port": 29400, "timeout_s": 300},
        "ssh": {"hosts": ["host1", "me@host2"], "port": 2222, "identity_file": "/keys/id", "options": ["-o", "A=b"]},
    },
    "ssh-image": {**BASE, "engine": "ssh", "container": CONTAINER, "ssh": {"hosts": ["me@host1", "host2"]}},
    "slurm": {
        **BASE,
        "engine": "slurm",
        "container": {**CONTAINER, "image": "registry.example#team/magi:1.1.1"},
        "workdir": "/workspace",
        "slurm": {"partition": "gpu", "account": "lab", "gpus_per_node": 8, "directives": ["--qos=high"]},
    },
    "slurm-bare": {**BASE, "engine": "slurm", "rendezvous": {"address": "10.0.0.1"}, "slurm": {"exclusive": False}},
    **{
        name: {
            **BASE,
            "engine": "k8s",
            "container": CONTAINER,
            "workdir": "/workspace",
            "k8s": {
                "template": name,
                "namespace": "lab",
                "gpus_per_node": 8,
                "rdma_resource": "rdma/ib",
                "max_restarts": 2,
            },
        }
        for name in ("jobset", "lws", "pytorchjob")
    },
    "jobset-one-node": {
        "command": ["-m", "mine"],
        "engine": "k8s",
        "container": {"image": IMAGE},
        "k8s": {"host_network": True},
    },
}


def spec_of(name: str) -> LaunchSpec:
    return check_spec(build(LaunchSpec, CASES[name], name))


def plans_of(name: str) -> list[LaunchPlan]:
    spec = spec_of(name)
    engine = engine_of(spec.engine)
    plans = [engine.up(spec, TARGET.session), engine.run(spec, TARGET)]
    if engine.IS_QUEUE:
        steps = (engine.status(spec, TARGET), engine.logs(spec, TARGET))
        plans.append(LaunchPlan("status and logs", tuple(s for s in steps if s)))
    return [*plans, engine.down(spec, TARGET.session, [TARGET])]
