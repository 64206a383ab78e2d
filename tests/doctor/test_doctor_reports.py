# SPDX-License-Identifier: Apache-2.0
"""Levels, reports, exit codes, the numbers of all ranks, and the commands."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile

import pytest

from magi_attention.cli import main
from magi_attention.cli.doctor import choose_ranks
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.tools.doctor import finding, group_checks, registry
from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from magi_attention.tools.doctor.system import System

GOOD, BAD = Finding("a", OK, "fine"), Finding("c", ERROR, "broken", "mend it")
SOSO, PASSED = Finding("b", WARNING, "slow", "speed up"), Finding("d", SKIPPED, "no GPU")


def test_exit_codes():
    for findings, plain, strict in (([], 0, 0), ([GOOD, PASSED], 0, 0), ([GOOD, SOSO], 0, 1), ([SOSO, BAD], 1, 1)):
        assert finding.exit_code(findings) == plain and finding.exit_code(findings, is_strict=True) == strict


@pytest.mark.parametrize(
    ("found", "words", "code"),
    [(SOSO, [], 0), (SOSO, ["--strict"], 1), (GOOD, ["--strict"], 0), (BAD, [], 1), (BAD, ["--strict"], 1)],
)
def test_status_of_the_command(found, words, code, monkeypatch, capsys):
    monkeypatch.setattr(registry, "CHECKS", (registry.Check("x", "", "static", lambda system: found),))
    assert main(["doctor", *words]) == code
    assert found.evidence in capsys.readouterr().out


def test_reports_tell_the_same():
    text = finding.as_text([GOOD, SOSO, BAD, PASSED])
    assert "-> mend it" in text and "1 ok, 1 warning, 1 error, 1 skipped" in text
    brief = finding.as_text([GOOD, SOSO, PASSED], only_problems=True)
    assert "fine" not in brief and "-> speed up" in brief and "1 ok, 1 warning, 1 skipped" in brief
    data = json.loads(finding.as_json([GOOD, SOSO]))
    assert data["status"] == "warning" and data["findings"][1]["remedy"] == "speed up"


def test_a_finding_that_mends_nothing_is_refused():
    for status, remedy in ((OK, "x"), (ERROR, ""), (WARNING, ""), (SKIPPED, "x")):
        with pytest.raises(ValueError, match="do not go together"):
            Finding("a", status, "evidence", remedy)


def test_levels_grow():
    static, quick, full = ({c.id for c in registry.checks_of(level)} for level in registry.LEVELS)
    assert static < quick < full and len(full) == len(registry.CHECKS)
    assert {"nccl", "p2p", "lib"} == full - quick and "gpu" not in static


def test_a_check_that_fails_hides_nothing(monkeypatch):
    def explode(system):
        raise RuntimeError("odd machine")

    checks = (registry.Check("x", "", "static", explode), registry.Check("y", "", "static", lambda system: GOOD))
    monkeypatch.setattr(registry, "CHECKS", checks)
    first, second = registry.examine(System(), "static")
    assert first.status == ERROR and "RuntimeError: odd machine" in first.evidence and second is GOOD


def numbers(**changes):
    rank = {"device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2"}, "environment": {}, "mtu": {"eth0": "9000"}}
    data = {
        "world": 4,
        "backend": "nccl",
        "mebibytes": 64,
        "bus_gb_per_s": 200.0,
        "is_right": True,
        "clock_offsets_s": [0.0, 0.001, -0.002, 0.0],
        "pairs_gb_per_s": {"0-1": 100.0, "0-2": 20.0, "0-3": 20.0, "1-2": 20.0, "1-3": 20.0, "2-3": 90.0},
        "ranks": [{**rank, "host": f"host{r // 2}"} for r in range(4)],
    }
    return {**data, **changes}


def one_host(**changes):
    data = numbers(**changes)
    return {**data, "ranks": [{**r, "host": "host0"} for r in data["ranks"]]}


def with_rank(number, **changes):
    data = numbers()
    data["ranks"][number] = {**data["ranks"][number], **changes}
    return data


@pytest.mark.parametrize(
    ("data", "check", "status", "evidence"),
    [
        (numbers(), "nccl", OK, "200.00 GB/s"),
        (one_host(), "nccl", OK, "at least 80 are usual"),
        (one_host(bus_gb_per_s=9.0), "nccl", WARNING, "at least 80 are usual for these GPUs"),
        (numbers(bus_gb_per_s=9.0), "nccl", OK, "9.00 GB/s"),  # between hosts the network decides
        (one_host(bus_gb_per_s=9.0, backend="gloo"), "nccl", OK, "gloo"),
        (one_host(bus_gb_per_s=0.0, world=1), "nccl", SKIPPED, "one rank has nobody"),
        (numbers(is_right=False), "nccl", ERROR, "the sum is wrong"),
        (numbers(), "link", OK, "between hosts 20.00 GB/s (slowest 20.00"),
        (numbers(pairs_gb_per_s={"0-2": 20.0, "0-3": 20.0, "1-2": 5.0}), "link", WARNING, "ranks 1-2 (host0, host1)"),
        (numbers(), "time", OK, "0.0020 s (rank 2 on host1)"),
        (numbers(clock_offsets_s=[0, 0, 0, -3.0]), "time", WARNING, "3.0000 s (rank 3 on host1)"),
        (numbers(), "same", OK, "equal on 4 ranks"),
        (with_rank(3, versions={"torch": "3"}), "same", ERROR, "torch is 2 on rank 0 (host0) and 3 on rank 3 (host1)"),
        (with_rank(1, environment={"NCCL_DEBUG": "INFO"}), "envs", WARNING, "NCCL_DEBUG is unset on rank 0"),
        (with_rank(2, mtu={"eth0": "1500"}), "mtu", WARNING, "eth0 is 9000 on rank 0 (host0) and 1500 on rank 2"),
    ],
)
def test_numbers_of_all_ranks(data, check, status, evidence):
    (found,) = [f for f in group_checks.group_findings(data) if f.check == check]
    assert found.status == status and evidence in found.evidence, found


def test_output_of_the_ranks_is_found_behind_a_prefix():
    line = f"[rank 0]: {group_checks.MARK}{json.dumps(numbers())}"
    assert group_checks.parse_output(f"[rank 1]: x\n{line}\n[node 0]: y\n") == numbers()
    assert group_checks.parse_output("nothing") is None


def test_bandwidth_of_one_machine():
    from test_doctor_checks import Machine

    line = f"{group_checks.MARK}{json.dumps(one_host())}\n"
    assert group_checks.check_bandwidth(Machine(commands={"benchmarking.collective": line})).status == OK


@pytest.mark.parametrize("flag", ["--static", "--quick"])
def test_the_command_needs_no_torch(flag):
    """Where torch cannot be imported at all it still answers, and says so."""
    code = "import sys; sys.modules['torch'] = None; from magi_attention.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", flag, "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    data = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "warning": 1, "error": 2}[data["status"]], done.stderr
    assert not [f for f in data["findings"] if "the check itself failed" in f["evidence"]]


def test_static_looks_at_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(System, "run", lambda *args, **kwargs: pytest.fail("no command may be run"))
    assert main(["doctor", "--static"]) in (0, 1)
    assert "torch" in capsys.readouterr().out


def test_every_finding_here_is_told_with_its_reason(capsys):
    code = main(["doctor", "--quick", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warning": 0, "error": 1}[data["status"]]
    assert {f["check"] for f in data["findings"]} == {c.id for c in registry.checks_of("quick")}
    assert all(f["evidence"] for f in data["findings"])


def test_wrong_requests(capsys):
    assert main(["doctor", "--nodes", "2"]) == 2
    assert "which only --pairwise does" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--static", "--quick"])
    assert "not allowed with" in capsys.readouterr().err
    assert main(["doctor", "--dry-run"]) == 0
    assert "nccl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "gpus", "shape"),
    [
        ([], 0, (2, 1)),  # this machine twice
        ([], 4, (1, 4)),  # not twice the same GPUs
        (["--engine", "ssh"], 8, (2, 8)),
        (["--nodes", "3"], 8, (3, 8)),
        (["--ranks-per-node", "2"], 4, (1, 2)),
    ],
)
def test_ranks_of_pairwise(words, gpus, shape):
    args = argparse.Namespace(engine=None, nodes=None, ranks_per_node=None)
    for option, value in zip(words[::2], words[1::2]):
        setattr(args, option[2:].replace("-", "_"), int(value) if value.isdecimal() else value)
    choose_ranks(args, gpus)
    assert (args.nodes, args.ranks_per_node) == shape


def test_pairwise_over_two_nodes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MAGI_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    code = main(["doctor", "--static", "--pairwise", "--nodes", "2", "--ranks-per-node", "1", "--json"])
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert code in (0, 1), found
    assert {"nccl", "link", "time", "same", "envs", "mtu"} <= set(found)
    assert "over 2 ranks" in found["nccl"]["evidence"] and found["time"]["status"] == OK


def test_pairwise_that_does_not_get_far(tmp_path, monkeypatch, capsys):
    """Nothing was compared, which is another exit code than a finding."""
    monkeypatch.setenv("MAGI_HOME", str(tmp_path))
    words = ["doctor", "--static", "--pairwise", "--nodes", "1", "--python", "/bin/false", "--no-preflight"]
    assert main(words) == finding.EXIT_NOT_RUN
    assert "the ranks did not finish: Node 0 ended with exit code 1" in capsys.readouterr().err


def test_collect_env(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_MY_TOKEN", "hidden")
    assert main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    data = json.loads(printed)
    assert data["environment"]["NCCL_MY_TOKEN"] == "(left out)" and "hidden" not in printed
    assert data["versions"]["torch"] and data["doctor"] and data["libraries"].keys() == {"planner", "ffa_sm90"}


def test_collect_env_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MAGI_HOME", str(tmp_path))
    assert main(["up", "--name", "one"]) == 0
    folder = tmp_path / "sessions" / "one" / "runs" / "001"
    folder.mkdir()
    target = {"session": "one", "run": "001", "run_id": "one-001-x", "folder": str(folder), "node_folder": str(folder)}
    run = {"state": "done", "target": target, "started": 0, "command": ["a"]}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "output.log").write_text("[rank 0]: hello\n")
    assert main(["collect-env", "--session", "one", "--output", str(tmp_path / "out.tar.gz")]) == 0
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert set(archive.getnames()) == {"environment.json", "run.json", "output.log"}
        assert archive.extractfile("output.log").read() == b"[rank 0]: hello\n"
