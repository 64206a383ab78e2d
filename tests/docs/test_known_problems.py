# SPDX-License-Identifier: Apache-2.0
"""docs/known-problems.md: its tests are there, and most of its rows have one."""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT

TEXT = (ROOT / "docs" / "known-problems.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))
ROWS = re.findall(r"^\| (\*\*.*?) \| (.*?) \| (.*?) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_a_named_test_is_there(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert any(function.startswith("test_") and name in ("", function) for function in functions)


def test_most_rows_have_a_test_that_runs_without_a_gpu():
    without = [complaint for complaint, _, tests in ROWS if tests == "-"]
    on_cpu = [complaint for complaint, _, tests in ROWS if "tests/" in tests and not tests.startswith("GPU")]
    assert len(ROWS) == 20 and len(without) <= 3 and len(on_cpu) >= 14
