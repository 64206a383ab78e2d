# SPDX-License-Identifier: Apache-2.0
"""What the engines render, against golden files, and what must hold in it whatever the wording."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess

import pytest
from launch_cases import CASES, GOLDEN, IMAGE, TARGET, TEXTS, plans_of, rendered, spec_of

from magi_attention.tools.launch.engines import docker, k8s, local, slurm
from magi_attention.tools.launch.node import parser


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert rendered(name) == expected, "if the change is meant: python tests/launch/launch_cases.py"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(TEXTS)


def runner_words(argv):
    return list(argv)[list(argv).index("magi_attention.tools.launch.node") + 1 :]


@pytest.mark.parametrize("name", ["local", "docker", "docker-cpu", "docker-gpus"])
def test_the_runner_understands_its_argv(name):
    spec = spec_of(name)
    steps = {"local": local, "docker": docker}[spec.engine].run(spec, TARGET).steps
    parsed = [parser().parse_args(runner_words(step.argv)) for step in steps]
    assert [args.node_rank for args in parsed] == [0, 1]
    assert len({(args.master_addr, args.master_port, args.run_id) for args in parsed}) == 1
    for args in parsed:
        assert args.command == list(spec.command) and args.watch_stdin and args.ranks_per_node == 8


def test_every_right_of_a_container_is_asked_for():
    flags = docker.run(spec_of("docker-cpu"), TARGET).steps[0].argv
    for word in ("--privileged", "/dev/infiniband", "IPC_LOCK", "SYS_PTRACE", "--gpus"):
        assert word not in flags
    assert {"/dev/infiniband", "IPC_LOCK", "SYS_PTRACE"} <= set(docker.run(spec_of("docker"), TARGET).steps[0].argv)


def test_the_sbatch_script_is_bash(tmp_path):
    for name in ("slurm", "slurm-bare"):
        script = tmp_path / "job.sbatch"
        script.write_text(slurm.script(spec_of(name), TARGET))
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(script)], check=True)


def test_a_job_without_hosts_stops(tmp_path):
    """No localhost fallback: where scontrol fails or says nothing, no rank starts."""
    target = dataclasses.replace(TARGET, folder=str(tmp_path))
    (tmp_path / "job.sbatch").write_text(slurm.script(spec_of("slurm"), target))
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\ntouch started\n")
    srun.chmod(0o755)
    for body in ("exit 1", "exit 0"):
        scontrol = tmp_path / "scontrol"
        scontrol.write_text(f"#!/bin/sh\n{body}\n")
        scontrol.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}
        done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode != 0 and not (tmp_path / "started").exists()
        assert int((tmp_path / "exit_code").read_text()) == done.returncode


def manifest(name):
    return json.loads(k8s.run(spec_of(name), TARGET).files[0].text)


def test_jobset_meets_at_its_first_pod():
    found = manifest("jobset")
    job = found["spec"]["replicatedJobs"][0]
    name = found["metadata"]["name"]
    args = parser().parse_args(runner_words(job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]))
    assert args.master_addr == f"{name}-{job['name']}-0-0.{name}" and args.node_rank_from == "JOB_COMPLETION_INDEX"
    indexed = job["template"]["spec"]
    assert indexed["completionMode"] == "Indexed" and indexed["completions"] == indexed["parallelism"] == 2
    assert len(args.master_addr.split(".")[0]) <= 63 and found["spec"]["network"]["enableDNSHostnames"]


PODS = {
    "jobset": lambda spec: [spec["replicatedJobs"][0]["template"]["spec"]["template"]],
    "lws": lambda spec: [spec["leaderWorkerTemplate"]["workerTemplate"]],
    "pytorchjob": lambda spec: [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()],
}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_what_the_spec_asks_for(name):
    found, labels = manifest(name), {"com.magi.session": "s1", "com.magi.run": TARGET.run_id}
    assert found["metadata"] == {"name": f"magi-{TARGET.run_id}", "namespace": "lab", "labels": labels}
    for template in PODS[name](found["spec"]):
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert template["metadata"]["labels"] == labels, "by which its state and output are found"
        args = parser().parse_args(runner_words([word.replace("$$", "$") for word in container["command"]]))
        assert (args.nodes, args.ranks_per_node, args.command) == (2, 8, CASES[name]["command"])
        assert (args.run_id, args.log_dir, args.watch_stdin) == (TARGET.run_id, "/tmp/magi-logs", False)
        assert container["ports"][0]["containerPort"] == args.master_port == 29500
        assert container["image"] == IMAGE and container["workingDir"] == "/workspace"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/ib": 1}
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK", "SYS_PTRACE"]
        assert "doctor" in container["readinessProbe"]["exec"]["command"]
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        mounts = {mount.pop("mountPath"): mount for mount in container["volumeMounts"]}
        assert mounts.keys() == {"/dev/shm", "/data", "/out"} and mounts["/data"]["readOnly"]
        assert volumes[mounts["/dev/shm"]["name"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
        for path in ("/data", "/out"):
            assert volumes[mounts[path]["name"]] == {"hostPath": {"path": path}}
    up, _, asked, down = ([step.argv for step in plan.steps] for plan in plans_of(name))
    assert all(argv[:3] == ("kubectl", "--namespace", "lab") for argv in (*up, *asked, *down))
    assert up[0][3:] == ("auth", "can-i", "create", k8s.RESOURCES[name])
    assert all(f"com.magi.run={TARGET.run_id}" in argv for argv in asked)
    assert down[0][3:] == ("delete", k8s.RESOURCES[name], "--ignore-not-found", f"magi-{TARGET.run_id}")


def test_another_try_is_that_of_the_spec():
    assert manifest("jobset")["spec"]["failurePolicy"] == {"maxRestarts": 2}
    job = manifest("jobset")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert manifest("lws")["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert manifest("lws")["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert manifest("pytorchjob")["spec"]["runPolicy"]["backoffLimit"] == 2
    assert manifest("jobset-one-node")["spec"]["failurePolicy"] == {"maxRestarts": 0}


def test_pods_have_no_privileges():
    for name in ("jobset", "lws", "pytorchjob", "jobset-one-node"):
        text = json.dumps(manifest(name))
        assert '"privileged": false' in text and '"medium": "Memory"' in text
        assert ("hostNetwork" in text) == (name == "jobset-one-node")


def test_pytorchjob_has_one_master():
    replicas = manifest("pytorchjob")["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 and replicas["Worker"]["replicas"] == 1
    assert replicas["Master"]["template"]["spec"]["containers"][0]["name"] == "pytorch"


def test_names_fit_into_a_dns_label():
    longest = "x" * 32 + "-001-abcdef"
    assert len(f"magi-{longest}-node9999") <= 63 and len(f"magi-{longest}-{k8s.NODES}-0-0") <= 63
