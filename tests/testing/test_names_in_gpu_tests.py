# SPDX-License-Identifier: Apache-2.0
"""GPU tests and scripts are not run where there is no GPU, but the names of ours that they use or replace are there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "gpu").glob("*.py")) + sorted((ROOT / "benchmarks").glob("*.py"))


def imported(tree: ast.Module) -> dict[str, object]:
    """Modules and classes of ours by the names that the file gives them, wherever it imports them."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "magi_attention":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")  # or there is no such name
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return {name: x for name, x in found.items() if isinstance(x, (ModuleType, type))}


def missing(source: str) -> list[str]:
    tree = ast.parse(source)
    ours = imported(tree)
    wanted: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            wanted.add((node.value.id, node.attr))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setattr":
            owner, name = node.args[:2]
            if isinstance(owner, ast.Name) and isinstance(name, ast.Constant):
                wanted.add((owner.id, name.value))
    return sorted(f"{a}.{b}" for a, b in wanted if a in ours and not hasattr(ours[a], b))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_are_there(path: Path) -> None:
    assert missing(path.read_text()) == []


def test_what_is_not_there_is_found() -> None:
    source = """
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
def test(monkeypatch):
    monkeypatch.setattr(ffa_backward, "select_schedule", None)
    monkeypatch.setattr(ffa_backward, "_begin", None)
    ffa_backward.steps, ffa_backward.select_schedule = 1, FfaBackend.forward
    return FfaBackend.backwards
"""
    assert missing(source) == ["FfaBackend.backwards", "ffa_backward._begin", "ffa_backward.steps"]
    with pytest.raises(ModuleNotFoundError, match="ffa_bwds"):
        missing("from magi_attention.kernels import ffa_bwds")
