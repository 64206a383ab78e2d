# SPDX-License-Identifier: Apache-2.0
"""Programs of several parts: each part is reached by its word, and pages name none that is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import group_collectives
import kernel
import node_exchange
import parts
import planner
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {program.__name__: program for program in (group_collectives, kernel, planner)}
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


def test_the_command_line_is_read_where_no_arguments_are_given(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["kernel.py", "stalls", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit) as stop:
        kernel.main()
    assert stop.value.code == 2 and "none.csv" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["kernel.py", "--heads"])
    assert parts.run_part(None, kernel.PARTS) is None and parts.run_part([], kernel.PARTS) is None


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


def test_rates_are_of_the_bytes_received():
    cell = {"rows": 4096, "received_bytes": 2**24, "us": {"copy": 40.0, "cast": 50.0, "reduce": 80.0}}
    line = group_collectives.table([cell]).split("\n")[3]
    assert "50.0 (336)" in line and line.split()[-2:] == ["0.80", "0.50"], "GB/s, and shares of a copy"
    told = node_exchange.line("blocks", [200.0, 400.0], [50_000_000, 60_000_000], [{"put": 120.0}, {}])
    assert "cast  200.0 us (250 GB/s, put 120)" in told and told.endswith("reduce  400.0 us (150 GB/s)")
