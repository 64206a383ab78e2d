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
        "run": "torch.distributed.run --standalone",
        "test": "-m pytest",
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--nodes", "2"], "There is nothing to run"),
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
