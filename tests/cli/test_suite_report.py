# SPDX-License-Identifier: Apache-2.0
"""The report of the GPU suite, out of what pytest writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.cli import suite_report, suites

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
def test_fine(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="needs another GPU")
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError("no device")
def test_error(broken): pass
"""


def test_what_ran_and_how_it_went(tmp_path):
    (tmp_path / "test_gpu_things.py").write_text(TESTS)
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", "test_gpu_things.py"]
    status = subprocess.run(command, cwd=tmp_path, capture_output=True).returncode
    path = suite_report.write_report(tmp_path, [junit, tmp_path / "none.xml"], status)
    report = json.loads(path.read_text())
    assert report["status"] == 1 and report["tests"]["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert report["tests"]["skipped"] == {"needs another GPU": 1}
    (wrong, error) = report["tests"]["failures"]
    assert wrong["test"] == "test_gpu_things::test_wrong" and "one is not two" in wrong["text"]
    assert error["test"].endswith("test_error") and "no device" in error["text"]
    assert report["machine"]["libraries"] and report["machine"]["doctor"]
    said = suite_report.summary(path)
    assert "1 passed, 2 failed, 1 skipped" in said and str(path) in said and "test_wrong" in said


def test_pytest_that_ends_early_leaves_a_report_too(tmp_path):
    path = suite_report.write_report(tmp_path, [tmp_path / "junit.xml"], 4)
    assert json.loads(path.read_text())["status"] == 4 and "No test ran" in suite_report.summary(path)


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((5, 0), 0), ((0, 5), 0), ((5, 1), 1), ((5, 5), 5)]
)
def test_the_suite_ends_as_pytest_does(codes, status, monkeypatch, tmp_path, capsys):
    """5: nothing was collected, as of one of the two parts where files are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    seen, left = [], list(codes)

    def run_child(command, environment):
        assert "PYTHONDONTWRITEBYTECODE" not in environment and environment["OMP_NUM_THREADS"] == "1"
        seen.append(command)
        return left.pop(0)

    monkeypatch.setattr(suites, "run_child", run_child)
    assert suites.run_gpu_suite([["pytest", "-m", "a"], ["pytest", "-m", "b"]]) == status
    assert [command[2] for command in seen] == ["a", "b"]
    assert all(command[-1].startswith("--junitxml=runs/gpu-suite-") for command in seen)
    assert "The report is runs/" in capsys.readouterr().out


COLLECT = """
import pytest
class Names:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            print("::", item.nodeid, *{mark.name for mark in item.iter_markers()})
pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "tests/gpu"], plugins=[Names()])
"""


def test_each_gpu_test_is_in_one_part():
    """Those that start several ranks, or measure, run alone."""
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True)
    parts = {suites.BESIDE_OTHERS: [], suites.ALONE: []}
    for _, name, *marks in (line.split(" ") for line in done.stdout.splitlines() if line.startswith(":: ")):
        known = {mark: mark in marks for mark in ("gpu", "whole_gpu")}
        (part,) = (expression for expression in parts if eval(expression, known))
        parts[part].append(name)
    beside, alone = parts.values()
    assert beside and alone and not any("one_launch" in name for name in beside)
    assert any("test_ffa_large" in name for name in alone)
