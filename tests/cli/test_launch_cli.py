# SPDX-License-Identifier: Apache-2.0
"""The launcher's verbs on the command line, without starting anything: --dry-run, render and wrong requests."""

from __future__ import annotations

import json
import shlex

import pytest

from magi_attention.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


SPEC = """
engine = "slurm"
nodes = 2
ranks_per_node = 4
command = ["train.py"]
[container]
image = "me/magi:1"
[k8s]
gpus_per_node = 4
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return str(path)


def test_dry_run_of_every_verb_prints_and_makes_nothing(home, spec, capsys):
    verbs = {
        "up --engine ssh --hosts {hosts}": "ssh -T",
        "run --dry-run train.py --nodes 2 -- --steps 3": "--node-rank 1",
        "run --spec {spec}": "sbatch --parsable",
        "run --nodes 2 train.py": "-- train.py",
        "run --nodes 2 train.py --ranks-per-node 3 -- train.py": "-- train.py train.py",
        "run": "magi_attention.tools.launch.torchrun --standalone --local-addr 127.0.0.1",
        "test": "-m 'not nightly'",
        "test -- -m slow": "worksteal -m slow",
        "test -- tests/a.py::test_long": "worksteal tests/a.py::test_long",
        "test --suite nightly": "-m nightly",
        "test --suite cpu": "'not gpu and not multinode'",
        "test --suite multinode": "magi_attention.testing.rank_pytest -m multinode tests/multinode",
        "test --suite gpu --engine docker --image me/magi:1": "rank_pytest -m gpu tests",
        "run --nodes 1 -- -m magi_attention.benchmarking.collective": "-m magi_attention.benchmarking.collective",
        "status": "",
        "down --all": "",
        "render jobset --spec {spec}": "kubectl apply",
    }
    hosts = home.parent / "hosts.txt"
    hosts.write_text("host1\n")
    for verb, words in verbs.items():
        before, dashes, behind = verb.format(hosts=hosts, spec=spec).partition(" -- ")
        arguments = [*shlex.split(before), *([] if "--dry-run" in before else ["--dry-run"])]
        assert main([*arguments, *(["--", *shlex.split(behind)] if dashes else [])]) == 0, verb
        printed = capsys.readouterr().out
        assert words in printed, (verb, printed)
    assert not home.exists()


def test_render_prints_the_manifest_alone(spec, capsys):
    assert main(["render", "jobset", "--spec", spec, "--name", "mine"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "JobSet" and found["metadata"]["name"] == "magi-mine-001"
    assert main(["render", "slurm", "--spec", spec, "other.py", "--", "--a", "b c"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash") and "-- other.py --a 'b c'" in printed


def test_render_writes_files(spec, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["render", "pytorchjob", "--spec", spec, "--output", str(out)]) == 0
    assert json.loads((out / "pytorchjob.json").read_text())["kind"] == "PyTorchJob"
    assert f"kubectl apply --filename {out}/pytorchjob.json" in (out / "commands.txt").read_text()
    assert main(["render", "local", "a.py", "--port", "29600", "--output", str(out)]) == 0
    assert "torch" not in (out / "commands.txt").read_text() and "a.py" in (out / "commands.txt").read_text()


def test_a_queue_is_asked_for_a_gpu_of_each_rank(capsys):
    def gpus(*words: str) -> str:
        assert main(["render", *words, "a.py", "--ranks-per-node", "4"]) == 0
        return capsys.readouterr().out

    assert "#SBATCH --gpus-per-node=4" in gpus("slurm")
    assert "#SBATCH --gpus-per-node=2" in gpus("slurm", "--gpus-per-node", "2")
    assert "gpus-per-node" not in gpus("slurm", "--gpus-per-node", "0") + gpus("slurm", "--gpus", "none")
    for template in ("jobset", "lws", "pytorchjob"):
        assert gpus(template, "--image", "i").count('"nvidia.com/gpu": 4') == 2  # limits and requests
        assert "nvidia.com" not in gpus(template, "--image", "i", "--gpus", "none")


def test_options_of_queues(spec, capsys):
    words = ["--partition", "gpu", "--account", "lab", "--time", "2-00", "--gpus-per-node", "8"]
    assert main(["render", "slurm", "--spec", spec, *words]) == 0
    printed = capsys.readouterr().out
    for line in ("--partition=gpu", "--account=lab", "--time=2-00", "--gpus-per-node=8"):
        assert f"#SBATCH {line}\n" in printed
    words = ["--namespace", "lab", "--queue", "long", "--time", "1:00:30", "--gpus-per-node", "8"]
    assert main(["render", "jobset", "--spec", spec, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"]["namespace"] == "lab"
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "long"
    assert found["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3630
    assert main(["render", "pytorchjob", "--spec", spec, *words]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3630


def test_a_variable_by_its_name(spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cr3t")
    monkeypatch.setenv("PLAIN", "a=b")
    out = tmp_path / "out"
    words = ["--env", "API_KEY", "--env", "PLAIN", "--env", "EMPTY=", "--output", str(out)]
    assert main(["render", "slurm", "--spec", spec, *words]) == 0
    assert (out / "secrets.env").read_text() == "export API_KEY=s3cr3t\n"
    script = (out / "job.sbatch").read_text()
    assert "export PLAIN=a=b\n" in script and "export EMPTY=''\n" in script
    capsys.readouterr()
    assert main(["render", "slurm", "--spec", spec, "--env", "NOT_SET_ANYWHERE"]) == 2
    assert "the name alone of a variable that is set here" in capsys.readouterr().err


def test_rendered_secrets_go_to_a_file_of_their_own(spec, tmp_path, capsys):
    out = tmp_path / "out"
    for target, file in (("slurm", "secrets.env"), ("jobset", "secrets.json")):
        words = ["render", target, "--spec", spec, "--env", "API_KEY=s3cr3ts3cr3t"]
        assert main(words) == 0
        printed = capsys.readouterr()
        assert "s3cr3t" not in printed.out + printed.err and file in printed.err
        assert main([*words, "--output", str(out)]) == 0
        assert str(out / file) in capsys.readouterr().out
        assert "s3cr3ts3cr3t" in (out / file).read_text()
        assert "s3cr3t" not in (out / "commands.txt").read_text()
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--nodes", "2"], "There is nothing to run"),
        (["run", "a.py", "--partition", "gpu"], "--partition is for engine slurm, and the engine is local"),
        (["render", "jobset", "a.py", "--image", "i", "--account", "x"], "--account is for engine slurm"),
        (["render", "slurm", "a.py", "--queue", "x"], "--queue is for engine k8s"),
        (["up", "--time", "10"], "--time is for engine slurm or k8s"),
        (["render", "slurm", "a.py", "--time", "soon"], "slurm.time is 'soon'; write it as 30 (minutes)"),
        (["render", "lws", "a.py", "--image", "i", "--time", "3"], "a LeaderWorkerSet runs until it is deleted"),
        (["render", "slurm", "a.py", "--partition", "a\nb"], "slurm.partition is 'a\\nb'; it must be one line"),
        (["run", __file__, "--address", "no-such-host.invalid"], "does not resolve on"),
        (["run", "a.py", "--steps", "3"], "--steps belongs to the built-in example"),
        (["run", "a.py", "--no-replay"], "--no-replay belongs to the built-in example"),
        (["run", "--", "--steps"], "belong to a script"),
        (["run", "a.py", "--session", "none"], "There is no session none"),
        (["run", "a.py", "--env", "A"], "write NAME=VALUE"),
        (["run", "a.py", "--name", "Bad Name"], "no name for a session"),
        (["run", "a.py", "--engine", "docker"], "name the image"),
        (["run", "a.py", "--spec", "/no/such.toml"], "cannot be read"),
        (["up", "--engine", "ssh"], "0 hosts for 1 nodes"),
        (["logs", "none"], "There is no session none"),
        (["status", "none"], "There is no session none"),
        (["down"], "or --all"),
        (["render", "jobset", "a.py"], "name the image"),
        (["render", "slurm"], "There is nothing to run"),
        (["test", "--suite", "gpu"], "magi doctor"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, words, capsys):
    import torch

    if arguments[:1] == ["test"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error, error


def test_what_is_for_the_script_goes_behind_dashes(capsys):
    with pytest.raises(SystemExit):
        main(["run", "a.py", "--mine"])
    assert "goes behind --" in capsys.readouterr().err


def test_a_session_keeps_its_options(home, capsys):
    assert main(["up", "--name", "one", "--nodes", "2", "--port", "29600"]) == 0
    assert main(["up", "--name", "one"]) == 2 and "is up already" in capsys.readouterr().err
    assert main(["run", "--session", "one", "a.py", "--nodes", "3"]) == 2
    assert "--nodes cannot change session one" in capsys.readouterr().err
    assert main(["run", "--session", "one", "a.py", "--dry-run"]) == 0
    assert "--nodes 2 --node-rank 1" in capsys.readouterr().out
    assert main(["logs", "one"]) == 2 and "has no run yet" in capsys.readouterr().err
    assert main(["status", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["session"], row["state"], row["nodes"], row["runs"]) == ("one", "up", 2, [])
    for _ in range(2):
        assert main(["down", "--remove", "one"]) == 0
    assert main(["up", "--name", "one"]) == 0, "one that is down may be made anew"
    assert main(["down", "--all", "--remove"]) == 0 and not list((home / "sessions").iterdir())


def test_a_damaged_session_is_named(home, capsys):
    assert main(["up", "--name", "one"]) == 0
    (home / "sessions" / "one" / "session.json").write_text("{")
    assert main(["status"]) == 2
    assert "session.json cannot be read" in capsys.readouterr().err
