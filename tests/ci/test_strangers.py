# SPDX-License-Identifier: Apache-2.0
"""ci/strangers.py: what counts as passed, refused and not run, the table, repositories. No framework is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import strangers
from strangers import Outcome
from strangers_programs import BOTH, NEITHER, PROGRAMS, Program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Program("tiny", "trl", "tests/test_tiny.py::test_train")
LOSSES = [{"loss": 2.0}, {"train_loss": 1.5}]
SENTENCE = "DPOTrainer of TRL makes batches of its own; SFTTrainer is the one that works."
REFUSED = f"E   magi_attention.errors.UnsupportedError: {SENTENCE}\n"


def passed(*losses: dict[str, float]) -> Outcome:
    return Outcome("passed", losses=list(losses))


@pytest.mark.parametrize(
    ("code", "text", "is_test", "state", "why"),
    [
        (0, "magi_attention.errors.ContractError: in a warning", False, "passed", ""),
        (1, f"Traceback\n{REFUSED}more\nRuntimeError: the end", False, "refused", SENTENCE),
        (1, f"[rank0]: {REFUSED[4:]}", False, "refused", SENTENCE),
        (2, "E   ImportError: cannot import name 'x'\n", True, "not run", "cannot import name 'x'"),
        (4, "ERROR: not found: test_tiny.py::test_train\n", True, "not run", "not found: test_tiny"),
        (1, "E   ImportError: cannot import name 'x'\n", True, "failed", "ImportError: cannot import name 'x'"),
        (1, "ImportError: cannot import name 'x'\n", False, "failed", "ImportError: cannot import name 'x'"),
        (1, "ValueError: one\n[rank1]: KeyError: 'two'\nx.ChildFailedError:\n", False, "failed", "KeyError: 'two'"),
        (7, "nothing", False, "failed", "ended with 7 and named no error"),
        (None, REFUSED, False, "failed", "had not ended"),
    ],
)
def test_outcome_of_a_run(code, text, is_test, state, why):
    made = strangers.outcome(code, text, LOSSES, is_test)
    assert made.state == state and why in made.why
    assert bool(made.losses) == (state == "passed")


def test_losses_are_compared():
    assert strangers.difference(LOSSES, LOSSES) == 0
    assert strangers.difference(LOSSES, [{"loss": 2.0}, {"train_loss": 1.5003}]) == pytest.approx(2e-4)
    for other in ([], LOSSES[:1], [{"loss": 2.0}, {"eval_loss": 1.5}], [{"loss": float("nan")}, LOSSES[1]]):
        assert strangers.difference(LOSSES, other) == float("inf")


@pytest.mark.parametrize(
    ("one", "two", "expects", "state", "is_as_expected"),
    [
        (passed(*LOSSES), passed(*LOSSES), BOTH, "passed", True),
        (passed(*LOSSES), passed(*LOSSES), NEITHER, "passed", False),
        (passed(*LOSSES), passed({"loss": 2.0}, {"train_loss": 1.6}), BOTH, "failed", False),
        (passed(), passed(), BOTH, "failed", False),
        (Outcome("refused", SENTENCE), Outcome("refused", SENTENCE), NEITHER, "refused", True),
        (Outcome("refused", SENTENCE), Outcome("refused", SENTENCE), BOTH, "refused", False),
        (passed(), Outcome("refused", SENTENCE), ("passed", "refused"), "refused", True),
        (passed(*LOSSES), Outcome("failed", "KeyError: 1"), BOTH, "failed", False),
        (Outcome("not run", "no path"), Outcome("not run", "no path"), BOTH, "not run", True),
    ],
)
def test_judgement(one, two, expects, state, is_as_expected):
    row = strangers.judge(replace(PROGRAM, expects=expects), one, two)
    assert (row.state, row.is_as_expected) == (state, is_as_expected)
    assert row.why


def test_the_programs():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names))
    assert {program.source for program in PROGRAMS} == {"transformers", "trl", "trl package"}
    assert all(program.reason.endswith(".") for program in PROGRAMS if program.reason)
    page = strangers.PAGE.read_text()
    assert [name for name in names if f"\n| {name} | " not in page] == []
    with pytest.raises(SystemExit, match="there is no program 'none'"):
        strangers.chosen(["none"])
    assert [program.name for program in strangers.chosen(["sft"])] == ["sft"]
