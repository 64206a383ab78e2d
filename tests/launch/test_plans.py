# SPDX-License-Identifier: Apache-2.0
"""What the engines render, against golden files, and what must hold in it whatever the wording."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess

import pytest
from launch_cases import CASES, GOLDEN, TARGET, rendered, spec_of

from magi_attention.tools.launch.engines import docker, k8s, local, slurm
from magi_attention.tools.launch.node import parser


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert rendered(name) == expected, "if the change is meant: python tests/launch/launch_cases.py"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


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
