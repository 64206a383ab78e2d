# SPDX-License-Identifier: Apache-2.0
"""Engine ``k8s``: one object per run, a JobSet; LeaderWorkerSet and PyTorchJob are other templates for it.

Manifests are JSON, which kubectl reads as it does YAML. The runner finds its number and node 0 by variables that the
controllers set; if one is missing it says so rather than run alone. Secret variables are in a Secret of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from magi_attention.env import secrets
from magi_attention.tools.launch.engines.node_command import (
    CONTAINER_LOGS,
    DOCTOR,
    RUN_LABEL,
    SESSION_LABEL,
    node_argv,
    token_of,
)
from magi_attention.tools.launch.plan import LaunchPlan, RenderedFile, Step, Target
from magi_attention.tools.launch.processes import MARK
from magi_attention.tools.launch.spec import LaunchSpec, seconds_of

IS_QUEUE = True
SECRETS = "secrets.json"  # in the run's folder
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
NODES = "nodes"  # name of the one replicated job of a JobSet
# template -> resource name for kubectl
RESOURCES = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "lws": "leaderworkersets.leaderworkerset.x-k8s.io",
    "pytorchjob": "pytorchjobs.kubeflow.org",
}


def object_name(target: Target) -> str:
    return f"magi-{target.run_id}"


def _labels(target: Target) -> dict[str, str]:
    return {SESSION_LABEL: target.session, RUN_LABEL: target.run_id}


def _runner(spec: LaunchSpec, target: Target, rank: Sequence[str], address: Sequence[str]) -> list[str]:
    python = spec.python or "python"
    argv = node_argv(spec, target, python, rank, address, CONTAINER_LOGS, watch_stdin=False, is_late_name=True)
    return [_literal(word) for word in argv]


def _literal(text: str) -> str:
    """Kubernetes would put the value of NAME in place of $(NAME), and $ in place of $$."""
    return text.replace("$", "$$")


def _hidden(spec: LaunchSpec, target: Target) -> dict[str, str]:
    """Variables for the Secret of a run. An account needs the right to make one only where there are any: without
    them the nodes know one another by the run's id."""
    hidden = secrets.split(spec.environment)[1]
    return {**hidden, **token_of(target)} if hidden else {}


def _variables(spec: LaunchSpec, target: Target) -> list[dict]:
    plain = {**secrets.split(spec.environment)[0], MARK: target.run_id}
    entries: list[dict] = [{"name": name, "value": _literal(value)} for name, value in plain.items()]
    for name in _hidden(spec, target):
        entries.append({"name": name, "valueFrom": {"secretKeyRef": {"name": object_name(target), "key": name}}})
    return sorted(entries, key=lambda entry: entry["name"])


def secret(spec: LaunchSpec, target: Target) -> dict:
    """The Secret of a run; its values are not expanded."""
    metadata = {"name": object_name(target), "namespace": spec.k8s.namespace, "labels": _labels(target)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": _hidden(spec, target)}


def pod_spec(spec: LaunchSpec, target: Target, command: list[str], container_name: str = "node") -> dict:
    """One node: all its GPUs, memory for /dev/shm, and the right to pin memory where RDMA is asked for."""
    limits: dict[str, object] = {}
    if gpus := spec.gpus_per_node(spec.k8s.gpus_per_node):
        limits["nvidia.com/gpu"] = gpus
    if spec.k8s.rdma_resource:
        limits[spec.k8s.rdma_resource] = 1
    container: dict[str, object] = {
        "name": container_name,
        "image": spec.container.image,
        "command": command,
        "env": _variables(spec, target),
        "ports": [{"name": "rendezvous", "containerPort": spec.port}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "readinessProbe": {
            "exec": {"command": [spec.python or "python", *DOCTOR]},
            "periodSeconds": 300,
            "timeoutSeconds": 20,
        },
    }
    if spec.workdir:
        container["workingDir"] = spec.workdir
    if limits:
        container["resources"] = {"limits": limits, "requests": limits}
    added = (["IPC_LOCK"] if spec.container.rdma or spec.k8s.rdma_resource else []) + (
        ["SYS_PTRACE"] if spec.container.nvshmem else []
    )
    container["securityContext"] = {"privileged": False, **({"capabilities": {"add": added}} if added else {})}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _quantity(spec.container.shm_size)}}
    volumes = [shm]
    for number, mount in enumerate(spec.container.mounts):
        source, where, *mode = mount.split(":")
        volumes.append({"name": f"mount{number}", "hostPath": {"path": source}})
        entry = {"name": f"mount{number}", "mountPath": where, **({"readOnly": True} if mode == ["ro"] else {})}
        container["volumeMounts"].append(entry)  # type: ignore[attr-defined]
    pod: dict[str, object] = {"containers": [container], "volumes": volumes}
    if spec.k8s.host_network:
        pod.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")
    return pod


def _quantity(size: str) -> str:
    """Docker's 16g is 16Gi here."""
    return f"{size[:-1]}{size[-1].upper()}i" if size[-1:] in "kmg" else size


def _deadline(spec: LaunchSpec) -> dict[str, int]:
    seconds = seconds_of(spec.k8s.time) if spec.k8s.time else None
    return {} if seconds is None else {"activeDeadlineSeconds": seconds}


def _object(api_version: str, kind: str, spec: LaunchSpec, target: Target, body: dict) -> dict:
    labels = _labels(target) | ({QUEUE_LABEL: spec.k8s.queue} if spec.k8s.queue else {})
    metadata = {"name": object_name(target), "namespace": spec.k8s.namespace, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": body}


def jobset(spec: LaunchSpec, target: Target) -> dict:
    """Pod k of the one indexed job is node k; pod 0 has a DNS name of its own."""
    name = object_name(target)
    head = spec.rendezvous.address or f"{name}-{NODES}-0-0.{name}"
    command = _runner(spec, target, ("--node-rank-from", "JOB_COMPLETION_INDEX"), ("--master-addr", head))
    pod = {**pod_spec(spec, target, command), "restartPolicy": "Never"}
    job = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "backoffLimit": 0,  # one pod that fails fails the job; the policy below decides about another try
        **_deadline(spec),
        "template": {"metadata": {"labels": _labels(target)}, "spec": pod},
    }
    body = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": spec.k8s.max_restarts},
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": job}}],
    }
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", spec, target, body)


def _head_of(spec: LaunchSpec, variable: str) -> tuple[str, str]:
    """Where node 0 is: the address that the spec gives, else what the operator puts into ``variable``."""
    given = spec.rendezvous.address
    return ("--master-addr", given) if given else ("--master-addr-from", variable)


def lws(spec: LaunchSpec, target: Target) -> dict:
    """A group of pods that is kept up: the command starts again when it ends, so it suits one that serves."""
    address = _head_of(spec, "LWS_LEADER_ADDRESS")
    command = _runner(spec, target, ("--node-rank-from", "LWS_WORKER_INDEX"), address)
    template = {"metadata": {"labels": _labels(target)}, "spec": pod_spec(spec, target, command)}
    group = {"size": spec.nodes, "restartPolicy": "RecreateGroupOnPodRestart", "workerTemplate": template}
    body = {"replicas": 1, "leaderWorkerTemplate": group}
    return _object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", spec, target, body)


def pytorchjob(spec: LaunchSpec, target: Target) -> dict:
    """Kubeflow's operator sets RANK of the pod and MASTER_ADDR; the container must be called pytorch."""
    command = _runner(spec, target, ("--node-rank-from", "RANK"), _head_of(spec, "MASTER_ADDR"))
    pod = pod_spec(spec, target, command, "pytorch")
    pod["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": spec.port}]
    template = {"metadata": {"labels": _labels(target)}, "spec": pod}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if spec.nodes > 1:
        replicas["Worker"] = {"replicas": spec.nodes - 1, "restartPolicy": "Never", "template": template}
    policy = {"backoffLimit": spec.k8s.max_restarts, **_deadline(spec)}
    body = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return _object("kubeflow.org/v1", "PyTorchJob", spec, target, body)


TEMPLATES: dict[str, Callable[[LaunchSpec, Target], dict]] = {"jobset": jobset, "lws": lws, "pytorchjob": pytorchjob}


def up(spec: LaunchSpec, session: str) -> LaunchPlan:
    resources = [RESOURCES[spec.k8s.template], *(["secrets"] if secrets.split(spec.environment)[1] else [])]
    steps = [
        Step(f"see that this account may make {name}", _kubectl(spec, "auth", "can-i", "create", name))
        for name in resources
    ]
    return LaunchPlan(f"up: session {session}, each run a {spec.k8s.template} of Kubernetes", tuple(steps))


def run(spec: LaunchSpec, target: Target) -> LaunchPlan:
    path = f"{target.folder}/{spec.k8s.template}.json"
    text = json.dumps(TEMPLATES[spec.k8s.template](spec, target), indent=2) + "\n"
    files = [RenderedFile(path, text)]
    if _hidden(spec, target):
        own = json.dumps(secret(spec, target), indent=2) + "\n"
        files.append(RenderedFile(f"{target.folder}/{SECRETS}", own, is_secret=True))
    argv = ["kubectl", "apply"]
    for file in reversed(files):  # the pods want their Secret
        argv += ["--filename", file.path]
    step = Step("submit", tuple(argv))
    title = f"run {target.run_id}: {spec.nodes} pods x {spec.ranks_per_node} ranks as a {spec.k8s.template}"
    return LaunchPlan(title, (step,), tuple(files))


def _kubectl(spec: LaunchSpec, *words: str) -> tuple[str, ...]:
    return ("kubectl", "--namespace", spec.k8s.namespace, *words)


def status(spec: LaunchSpec, target: Target) -> Step:
    """Prints one phase per pod, nothing if there is no pod."""
    fields = "jsonpath={range .items[*]}{.status.phase}{'\\n'}{end}"
    argv = _kubectl(spec, "get", "pods", "--selector", f"{RUN_LABEL}={target.run_id}", "--output", fields)
    return Step(f"pods of run {target.run}", argv)


def logs(spec: LaunchSpec, target: Target, follow: bool = False) -> Step | None:
    argv = _kubectl(spec, "logs", "--selector", f"{RUN_LABEL}={target.run_id}", "--tail=-1", "--max-log-requests=64")
    argv += ("--follow",) if follow else ()
    return Step(f"output of run {target.run}", argv)


def down(spec: LaunchSpec, session: str, targets: Sequence[Target]) -> LaunchPlan:
    resources = RESOURCES[spec.k8s.template] + (",secrets" if secrets.split(spec.environment)[1] else "")
    argv = _kubectl(spec, "delete", resources, "--ignore-not-found")
    steps = [Step(f"delete run {t.run}", (*argv, object_name(t))) for t in targets]
    return LaunchPlan(f"down: session {session}", tuple(steps))
