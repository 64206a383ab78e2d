# SPDX-License-Identifier: Apache-2.0
"""The supervisor with commands that are no runners, and the steps that run one after another."""

from __future__ import annotations

import io
import sys

import pytest

from magi_attention.errors import LaunchError
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.tools.launch import supervise
from magi_attention.tools.launch.logs import lines_of, make_selection, read_lines, select
from magi_attention.tools.launch.plan import LaunchPlan, RenderedFile, Step
from magi_attention.tools.launch.spec import LaunchSpec
from magi_attention.tools.launch.supervise import Supervisor, run_steps, write_files

REPORT = """
Failures:
[1]:
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 5)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 6)
"""


def run(*codes, grace_s=DEADLINE_S):
    """Outcome, log and what was shown of one node per piece of Python."""
    steps = tuple(Step(f"node {n}", (sys.executable, "-c", code)) for n, code in enumerate(codes))
    log, shown = io.BytesIO(), []
    outcome = Supervisor(LaunchPlan("test", steps), log, shown.append, grace_s).run()
    return outcome, log.getvalue().decode(), b"".join(shown).decode()


def test_lines_are_prefixed_once():
    outcome, log, shown = run("print('[rank 5]: a'); print('b')", "print('no end', end='')")
    assert outcome.exit_code == 0 and log == shown
    assert sorted(log.splitlines()) == ["[node 0]: b", "[node 1]: no end", "[rank 5]: a"]


def test_the_first_cause_of_torchruns_report_is_told():
    outcome, _, _ = run("pass", f"print({REPORT!r}); raise SystemExit(1)")
    assert (outcome.exit_code, outcome.reason) == (1, "Rank 3 ended with signal SIGKILL (9) on node 1.")


def test_a_failure_without_a_report(monkeypatch):
    outcome, _, _ = run("print('the last words'); raise SystemExit(127)")
    assert (outcome.exit_code, outcome.reason) == (127, "Node 0 ended with exit code 127: the last words")
    outcome, _, _ = run("raise SystemExit(3)")
    assert outcome.reason == "Node 0 ended with exit code 3 and printed nothing."


def test_a_refusal_wins_and_the_others_are_stopped():
    code = "print('[node 1]: refused: the port is taken.'); raise SystemExit(2)"
    # the other node ends when its input does, as runners do, long before its grace is over
    outcome, log, shown = run("import sys; sys.stdin.read(); print('late')", code)
    assert outcome.reason == "the port is taken." and outcome.exit_code == 2 and outcome.is_clean
    assert "late" in log and "late" not in shown


def test_a_node_that_does_not_react_is_killed(monkeypatch):
    monkeypatch.setattr(supervise, "OTHERS_GRACE_S", 0.1)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    outcome, _, _ = run(stubborn, "raise SystemExit(1)", grace_s=0)
    assert not outcome.is_clean and outcome.exit_code == 1


def test_a_command_that_does_not_exist_stops_the_others():
    steps = (Step("node 0", (sys.executable, "-c", "input()")), Step("node 1", ("/no/such/program",)))
    supervisor = Supervisor(LaunchPlan("test", steps), io.BytesIO(), lambda line: None, DEADLINE_S)
    with pytest.raises(LaunchError, match="node 1: /no/such/program cannot be started"):
        supervisor.run()


def test_steps():
    python = (sys.executable, "-c")
    said = []
    plan = LaunchPlan("t", (Step("one", (*python, "print(1)")), Step("two", (*python, "print(2)"))))
    assert run_steps(plan, DEADLINE_S, said.append) == ["1\n", "2\n"] and said == ["one", "two"]
    failing = Step("try", (*python, "raise SystemExit('No such network')"), tolerated="no such NETWORK")
    assert run_steps(LaunchPlan("t", (failing,)), DEADLINE_S, said.append) == ["No such network\n"]
    for step, words in (
        (Step("try", (*python, "raise SystemExit('bad image')")), "try: .* ended with code 1: bad image"),
        (Step("try", ("/no/such/program",)), "cannot be started"),
        (Step("try", (*python, "import time; time.sleep(3600)")), "had not ended after 0.3 s"),
    ):
        with pytest.raises(LaunchError, match=words):
            run_steps(LaunchPlan("t", (step,)), 0.3 if "sleep" in step.argv[-1] else DEADLINE_S, said.append)


def test_files_that_cannot_be_written(tmp_path):
    write_files((RenderedFile(str(tmp_path / "a"), "text"),))
    assert (tmp_path / "a").read_text() == "text"
    with pytest.raises(LaunchError, match="cannot be written"):
        write_files((RenderedFile(str(tmp_path / "none" / "a"), ""),))


LOG = "[node 0]: up\n[rank 0]: a\n[rank 3]: b NCCL\n[node 1]: c\nbare"


def test_log_selections(tmp_path):
    path = tmp_path / "output.log"
    path.write_text(LOG)

    spec = LaunchSpec(nodes=2, ranks_per_node=2)

    def chosen(rank, node, grep=None):
        return list(select(read_lines(path), make_selection(rank, node, spec, grep)))

    assert chosen(None, None) == LOG.split("\n")
    assert chosen(3, None) == chosen(3, 1) == ["[rank 3]: b NCCL"]
    assert chosen(None, 1) == ["[rank 3]: b NCCL", "[node 1]: c"]
    assert chosen(None, 0, "a$") == ["[rank 0]: a"]
    for arguments, words in (
        ((None, None, "("), "no regular expression"),
        ((4, None), "--rank is 4; the run has ranks 0 to 3"),
        ((-1, None), "--rank is -1; the run has ranks 0 to 3"),
        ((None, 2), "--node is 2; the run has nodes 0 to 1"),
        ((1, 1), "--rank is 1; node 1 has ranks 2 to 3"),
    ):
        with pytest.raises(LaunchError, match=words):
            chosen(*arguments)
    with pytest.raises(LaunchError, match="no log yet"):
        list(read_lines(tmp_path / "none"))


def test_lines_of_a_command():
    python = (sys.executable, "-c")
    assert list(lines_of(Step("logs", (*python, "print('a'); print('b')")))) == ["a", "b"]
    with pytest.raises(LaunchError, match="failed: no such pod"):
        list(lines_of(Step("logs", (*python, "raise SystemExit('no such pod')"))))
    with pytest.raises(LaunchError, match="cannot be started"):
        list(lines_of(Step("logs", ("/no/such/program",))))


def test_lines_of_a_command_that_warns_a_lot():
    """More on standard error than a pipe holds, before the last line and in front of a failure."""
    code = "import sys; print('first', flush=True); sys.stderr.write('w' * 300_000 + '{}'); print('last'); sys.exit({})"
    argv = (sys.executable, "-c")
    assert list(lines_of(Step("logs", (*argv, code.format("", 0))))) == ["first", "last"]
    with pytest.raises(LaunchError, match="no such pod$") as told:
        list(lines_of(Step("logs", (*argv, code.format("no such pod", 1)))))
    assert len(str(told.value)) < 5000


def test_variables_by_standard_input():
    """More than a pipe holds, to nodes that read them late or never, and what follows them is left for the node."""
    step = Step("x", (), exports={"A": "it's", "B": "b" * 100_000, "C": "c" * 100_000})
    shell = f'eval "$(head -c {len(step.stdin)})" && echo "${{A}} ${{#B}} ${{#C}}" && exec cat'
    steps = [Step("node 0", ("sh", "-c", shell), exports=step.exports), Step("node 1", ("true",), exports=step.exports)]
    log = io.BytesIO()
    supervisor = Supervisor(LaunchPlan("test", tuple(steps)), log, lambda line: None, DEADLINE_S)
    supervisor._stop_at = 0.0  # the end of standard input is what ends cat
    assert supervisor.run().exit_code == 0
    assert log.getvalue().decode() == "[node 0]: it's 100000 100000\n"
    look = Step("look", ("sh", "-c", shell), exports=step.exports)
    assert run_steps(LaunchPlan("steps", (look,)), DEADLINE_S, lambda text: None) == ["it's 100000 100000\n"]


def test_following_a_log(tmp_path):
    path, writes = tmp_path / "output.log", iter(["a\nb", "c\n", "d"])
    path.write_text("")

    def is_running():
        text = next(writes, None)
        if text is not None:
            with path.open("a") as file:
                file.write(text)
        return text is not None

    assert list(read_lines(path, is_running, poll_s=0.01)) == ["a", "bc", "d"]
