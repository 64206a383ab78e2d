# SPDX-License-Identifier: Apache-2.0
"""What the engines render: what must hold in it whatever the wording."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess

import pytest
from launch_cases import CASES, IMAGE, TARGET, plans_of, spec_of

from magi_attention.tools.launch.engines import docker, k8s, local, slurm
from magi_attention.tools.launch.node import parser

RANKS = "--nodes 2", "--ranks-per-node 8", "--run-id s1-001-abcdef", "--grace 10"
DOCKER = "--shm-size 16g", "--ulimit stack=67108864", "--rm", "--init", "--env NCCL_DEBUG=INFO", IMAGE
RIGHTS = "--ulimit memlock=-1", "--gpus all", "--device /dev/infiniband", "--cap-add IPC_LOCK", "--cap-add SYS_PTRACE"
MOUNTS = "--volume /data:/data:ro", "--volume /out:/out"
DOCTOR = "magi_attention.cli doctor --quick --problems"
NODES = "magi-s1-001-abcdef-node0 magi-s1-001-abcdef-node1"
# What the plans of a case hold, and what they do not.
WORDS = {
    "local": ((DOCTOR, "--master-addr 127.0.0.1 --master-port 29611", "--max-restarts 1", "--sweep"), ("docker",)),
    "docker": (
        (*DOCKER, *RIGHTS, *MOUNTS, DOCTOR, "network create --label com.magi.session=s1 magi-s1", "--network magi-s1",
         "--workdir /workspace", "--master-addr magi-s1-001-abcdef-node0 --master-port 29500", "--resolve-timeout 120",
         f"docker rm --force {NODES}", "network rm magi-s1", "target=/var/log/magi", f"--user {os.getuid()}:"),
        (),
    ),
    "docker-cpu": ((*DOCKER, "--entrypoint true", "--network magi-s1"), (DOCTOR, "memlock", *RIGHTS[1:], MOUNTS[0])),
    "docker-gpus": (
        (*DOCKER, DOCTOR, """--gpus '"device=0,1"'""", "--network host", "--master-addr 127.0.0.1"),
        ("network create", "network rm", "infiniband"),
    ),
    "ssh": (
        ("-o BatchMode=yes -o ConnectTimeout=10", "-p 2222 -i /keys/id -o A=b -- host1 ", "-o A=b -- me@host2 ", DOCTOR,
         "--master-addr 10.0.0.1 --master-port 29400 --timeout 300", "/srv/my code", "--watch-stdin", "--sweep"),
        ("docker",),
    ),
    "ssh-image": (
        (*DOCKER, *RIGHTS, *MOUNTS, DOCTOR, "-- me@host1 ", "-- host2 ", "--network host", "--master-addr host1",
         "docker rm --force magi-s1-001-abcdef-node1"),
        ("--user", "--sweep"),
    ),
    "slurm": (
        (*(f"#SBATCH --{x}\n" for x in ("nodes=2", "ntasks-per-node=1", "time=01:00:00", "exclusive", "gpus-per-node=8",
                                        "partition=gpu", "account=lab", "qos=high")),
         "--kill-on-bad-exit=1", "--container-image=registry.example#team/magi:1.1.1", "--container-workdir=/workspace",
         "--container-mounts=/data:/data:ro,/out:/out,", "--container-env=MAGI_RUN_HEAD,MAGI_RUN_ID,MAGI_RUN_TOKEN,",
         "--node-rank-from SLURM_NODEID", "sbatch --parsable", "squeue", "scancel --name magi-s1-001-abcdef"),
        (),
    ),
    "slurm-bare": (("#SBATCH --gpus-per-node=8\n", "--master-addr 10.0.0.1"), ("exclusive", "container", "scontrol")),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_a_plan_asks_for_what_the_spec_says(name):
    """With the command's words as they were given. Kubernetes reads manifests: see below."""
    text, (held, absent) = "\n".join(plan.text() for plan in plans_of(name)), WORDS[name]
    assert [words for words in (*RANKS, *held, "train.py --data", "two words", "$HOME/x") if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_every_engine_has_such_a_case():
    assert WORDS.keys() == {name for name, case in CASES.items() if case["engine"] != "k8s"}


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
