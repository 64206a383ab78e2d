# SPDX-License-Identifier: Apache-2.0
"""What a user reads when a run cannot start or ends badly: the cause in a few lines, and where the rest is."""

from __future__ import annotations

import os
import re
import sys

import pytest
from launching import SCRIPT, processes_of

from magi_attention.cli.run import told_failure
from magi_attention.errors import LaunchError
from magi_attention.tools.launch import node, service
from magi_attention.tools.launch.failure import FailureReport, last_words
from magi_attention.tools.launch.spec import LaunchSpec

FAILING = """
import os, sys
rank = int(os.environ["RANK"])
print("before", flush=True)
if sys.argv[2:] == ["in-a-group"]:
    import torch.distributed
    torch.distributed.init_process_group("gloo")

def step(loss):
    if rank == int(sys.argv[1]):
        raise ValueError(f"the loss is {loss} at step 3")

step("NaN")
import time
time.sleep(3600)
"""
TORCHRUNS = ("torch/distributed", "ChildFailedError", "Root Cause", "error_file", "closing signal", "exitcode  :")


@pytest.fixture
def failing(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return str(path)


def unique(name: str) -> str:
    return f"{name}-{os.getpid()}"


ONE_NODE, TWO_NODES = ("--ranks-per-node", "2"), ("--nodes", "2", "--ranks-per-node", "1")


# in a group torch puts "[rank1]: " before every line of a traceback
@pytest.mark.parametrize(("shape", "group"), [(TWO_NODES, ()), (ONE_NODE, ("in-a-group",))])
def test_the_cause_of_a_crash_comes_in_a_few_lines(magi, failing, shape, group):
    name = unique("cause")
    done = magi("run", failing, *shape, "--name", name, "--", "1", *group)
    assert done.returncode == 1
    on = "node 1" if "--nodes" in shape else "node 0"
    told = done.stderr[done.stderr.index(f"magi: run 001 of {name} failed") :].splitlines()
    assert told[0] == f"magi: run 001 of {name} failed: Rank 1 ended with exit code 1 on {on}."
    assert "  ValueError: the loss is NaN at step 3" in told, done.stdout + done.stderr
    cause = told.index("  ValueError: the loss is NaN at step 3")  # what came by stdout may stand behind it
    assert "raise ValueError" in told[cause - 1] and told[cause + 1 : -1] in ([], ["  before"])
    log = magi.folder(name) / "output.log"
    assert told[-1] == f"magi: the whole log, with torchrun's report: {log}" and len(told) <= 8, told
    # torchrun's account is in the log and nowhere else
    assert not [words for words in TORCHRUNS if words in done.stdout + done.stderr]
    assert all(words in log.read_text() for words in ("ChildFailedError", "Root Cause", "exitcode  : 1"))
    prefix = "[rank 1]: [rank1]: " if group else "[rank 1]: "
    assert f"{prefix}ValueError: the loss is NaN" in done.stdout and "[rank 0]: before" in done.stdout
    assert processes_of(name) == []


def test_what_no_rank_printed_is_shown(magi, tmp_path):
    """Words without a prefix are kept from the terminal only where they are torchrun's report."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such luck with this interpreter' >&2\nexit 9\n")
    python.chmod(0o755)
    name = unique("words")
    done = magi("run", SCRIPT, "--python", str(python), "--no-preflight", "--name", name, "--", "hello")
    assert done.returncode == 1 and "[node 0]: no such luck with this interpreter" in done.stdout
    assert "Node 0 ended with exit code 9: no such luck" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/train.py"], "There is no script /no/such/train.py"),
        (["--", "-m", "no_such_module.train"], "There is no module no_such_module"),
        (["--", "-m"], "-m has no module behind it"),
    ],
)
def test_a_missing_script_starts_nothing(magi, command, words):
    done = magi("run", "--nodes", "2", "--ranks-per-node", "2", *command)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "" and not magi.home.exists()


def test_a_missing_script_in_a_session(magi):
    assert magi("up", "--name", "one").returncode == 0
    done = magi("run", "--session", "one", "/no/such/train.py")
    assert done.returncode == 2 and "There is no script /no/such/train.py" in done.stderr
    assert not list((magi.home / "sessions" / "one" / "runs").iterdir())
    dry = magi("run", "--session", "one", "/no/such/train.py", "--dry-run")
    assert dry.returncode == 0 and "/no/such/train.py" in dry.stdout


def test_every_node_sees_to_its_own_script(capfd, monkeypatch, tmp_path):
    """As on machines that the launcher cannot look into: the node refuses before it meets others or starts ranks."""
    monkeypatch.setattr(node.NodeRunner, "run", lambda *arguments: pytest.fail("ranks were started"))
    monkeypatch.setattr(node.NodeRunner, "meet", lambda *arguments: pytest.fail("it waited for others"))
    monkeypatch.chdir(tmp_path)
    words = ["--run-id", "x", "--nodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--log-dir", "logs"]
    assert node.main([*words, "--", "train.py"]) == node.REFUSED
    said = capfd.readouterr().out
    assert f"[node 1]: refused: There is no script train.py, seen from {tmp_path} on " in said


def test_where_scripts_and_modules_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("")
    before = list(sys.path)
    for command in (["train.py"], [str(tmp_path / "train.py")], ["mine"], ["-m", "mine.train"], ["-m", "json.tool"]):
        node.check_command(command)
    assert sys.path == before
    # another Python, or one with other folders to look into, may have the module
    missing = LaunchSpec(command=("-m", "no_such_module"))
    with pytest.raises(LaunchError, match="There is no module no_such_module"):
        service.check_here(missing)
    for changes in ({"python": "/other/python"}, {"environment": {"PYTHONPATH": "/x"}}, {"engine": "ssh"}):
        service.check_here(LaunchSpec(command=missing.command, **changes))


# ---- reading what was printed ---------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 9, in <module>
    main()
  File "a.py", line 5, in main
    step(3)
    ~~~~^^^
  File "a.py", line 2, in step
    raise KeyError(3)
KeyError: 3"""


def test_last_words_are_the_end_of_the_last_traceback():
    end = ['  File "a.py", line 5, in main', "    step(3)", '  File "a.py", line 2, in step', "    raise KeyError(3)"]
    lines = TRACEBACK.split("\n")
    assert last_words(lines) == [*end, "KeyError: 3"]
    assert last_words([*lines, "stdout that was flushed late", "more"]) == [*end, "KeyError: 3"]
    ignored = ["Exception ignored in: <function f>", "Traceback (most recent call last):", '  File "b"', "OSError: x"]
    assert last_words([*lines, *ignored]) == [*end, "KeyError: 3"]
    chained = ["", "During handling of the above exception, another exception occurred:", "", *lines[:3], "OSError: y"]
    assert last_words([*lines, *chained]) == ['  File "a.py", line 9, in <module>', "    main()", "OSError: y"]
    assert last_words(["a", "b", "", "c", "Segmentation fault"]) == ["b", "c", "Segmentation fault"]
    assert last_words([]) == []


def report_of(rank: int, code: int) -> str:
    """torchrun's account of a failure, as far as it is read."""
    return (
        f"E1125 16:53:19.238000 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) x\n"
        "Traceback (most recent call last):\n  raise ChildFailedError(\nRoot Cause (first observed failure):\n[0]:\n"
        f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 6)\n"
    )


def test_lines_of_ranks_and_of_torchrun_are_told_apart():
    report = FailureReport()
    assert not report.take("a word of the interpreter") and report.sentence == "" and report.last_words() == []
    for rank in (0, 3):
        for line in TRACEBACK.replace("3", str(rank)).split("\n"):
            assert not report.take(f"[rank {rank}]: {line}")
    assert not report.take("[node 0]: stopping")
    assert all(report.take(line) for line in report_of(3, -9).splitlines())
    assert report.sentence == "rank 3 ended with signal SIGKILL (9)" and report.last_words()[-1] == "KeyError: 3"
    assert not report.take("[rank 1]: still here") and report.take("=====")


def test_failures_of_the_example(tmp_path):
    log = tmp_path / "training.log"
    ranks = "".join(f"[rank {k}]: {line}\n" for k in (2, 0) for line in TRACEBACK.replace("3", str(k)).split("\n"))
    log.write_text(ranks + report_of(2, 1))
    told = told_failure("training", 1, log)
    assert told[0] == "magi: the training failed: rank 2 ended with exit code 1."
    assert told[-2:] == ["  KeyError: 2", f"magi: the whole log: {log}"] and len(told) == 7
    log.write_text(TRACEBACK)  # of one process, without prefixes
    told = told_failure("replay", -11, log)
    assert told[0] == "magi: the replay failed: it ended with signal SIGSEGV (11)." and told[-2] == "  KeyError: 3"
    assert not re.search("None", "\n".join(told))
