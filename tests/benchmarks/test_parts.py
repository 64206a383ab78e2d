# SPDX-License-Identifier: Apache-2.0
"""Programs of several parts: each part is reached by its word, and pages name none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import context_parallel
import group_collectives
import kernel
import node_exchange
import planner
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {program.__name__: program for program in (context_parallel, group_collectives, kernel, planner)}
PARTS = [(name, word) for name, program in PROGRAMS.items() for word in program.PARTS]


@pytest.mark.parametrize(("name", "word"), PARTS)
def test_a_part_has_options_of_its_own(name, word, capsys):
    with pytest.raises(SystemExit) as stop:
        PROGRAMS[name].main([word, "--help"])
    told = capsys.readouterr().out
    assert stop.value.code == 0 and f"usage: {name}.py {word} " in told
    with pytest.raises(SystemExit):
        PROGRAMS[name].main(["--help"])
    own = capsys.readouterr().out
    assert f"usage: {name}.py {word} " not in own and f" {word}: " in " ".join(own.split())


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="there are no pages here")
def test_pages_name_parts_that_are_there():
    found = set()
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]:
        for name, word in re.findall(r"benchmarks/(\w+)\.py ([a-z][a-z-]*)", page.read_text()):
            if name in PROGRAMS:
                found.add((name, word))
    assert found and found <= set(PARTS)


def test_there_are_few_programs():
    programs = [file.name for file in (ROOT / "benchmarks").rglob("*.py") if "\nif __name__ ==" in file.read_text()]
    assert len(programs) <= 9, programs


@pytest.mark.parametrize("program", (group_collectives, node_exchange), ids=lambda program: program.__name__)
def test_programs_of_several_ranks_say_how_they_are_run(program, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        program.main([])
    assert "torchrun" in capsys.readouterr().err
