# SPDX-License-Identifier: Apache-2.0
"""ci/lock holds what pyproject.toml asks for, at the versions of ci/constraints.txt, with hashes and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import make_locks
import matrix
import pytest

ROOT = Path(__file__).resolve().parents[2]
tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib; newer ones run this.")
requirements = pytest.importorskip("packaging.requirements")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = matrix.load()["pythons"]


def entries(text: str) -> list[tuple[requirements.Requirement, list[str]]]:
    """(requirement, hashes) of a lock file; fails on a line of any other kind."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head, *hashes = re.split(r"\s+--hash=", line.strip())
        assert not head.startswith("-"), f"an option in a lock: {head}"
        found.append((requirements.Requirement(head), hashes))
    return found


def pins(text: str, python: str) -> dict[str, str]:
    """Version by project that the file gives to one Python on our platform."""
    platform = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    platform |= {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    platform |= {"python_version": python, "python_full_version": f"{python}.0"}
    out = {}
    for requirement, _ in entries(text):
        if requirement.marker is None or requirement.marker.evaluate(platform):
            name = make_locks.normal(requirement.name)
            assert name not in out, f"{name} is pinned twice for Python {python}"
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "*" not in specifier.version
            out[name] = specifier.version
    return out


def lacks(lock: str, text: str, python: str, project: dict = PROJECT) -> list[str]:
    """What pyproject.toml asks of the lock and the file does not give to this Python."""
    have, missing = pins(text, python), []
    for line in make_locks.inputs(lock, project):
        requirement = requirements.Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        version = have.get(make_locks.normal(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{line}, not {version}")
    return missing


def read(lock: str) -> str:
    return (make_locks.FOLDER / f"{lock}.txt").read_text()


def test_every_lock_is_there_and_no_other():
    assert {p.stem for p in make_locks.FOLDER.iterdir()} == set(make_locks.LOCKS)


@pytest.mark.parametrize("lock", make_locks.LOCKS)
def test_hashes_and_nothing_but_them(lock):
    text = read(lock)
    assert text.startswith(make_locks.HEADER) and "://" not in text
    found = entries(text)
    assert found and all(hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes) for _, hashes in found)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", make_locks.LOCKS)
def test_the_lock_gives_what_pyproject_asks_for(lock, python):
    if make_locks.version(python) < make_locks.version(make_locks.PYTHONS.get(lock, python)):
        return  # nothing is installed there
    beside = make_locks.BESIDE.get(lock)
    assert lacks(lock, read(lock) + (read(beside) if beside else ""), python) == []


def test_a_lock_beside_another_has_nothing_of_it():
    for lock, other in make_locks.BESIDE.items():
        mine, theirs = (make_locks.names(make_locks.FOLDER / f"{name}.txt") for name in (lock, other))
        assert mine and theirs and not mine & theirs


@pytest.mark.parametrize("lock", make_locks.LOCKS)
def test_versions_are_those_the_suite_is_run_against(lock):
    constraints = (ROOT / "ci" / "constraints.txt").read_text()
    for python in PYTHONS:
        wanted, have = pins(constraints, python), pins(read(lock), python)
        shared = set(wanted) & set(have)
        assert {n: have[n] for n in shared} == {n: wanted[n] for n in shared}
        # cibuildwheel needs 3.11, so nothing is installed there.
        assert shared or (lock, python) == ("wheels", "3.10") or lock in make_locks.BESIDE


def test_these_checks_can_fail():
    text = read("lint")
    project = {**PROJECT, "build-system": {"requires": ["ruff>=99"]}}  # later lists win
    assert lacks("lint", text, "3.12", project) == [f"ruff>=99, not {pins(text, '3.12')['ruff']}"]
    assert lacks("lint", "", "3.12") == ["clang-format, not None", "pyyaml, not None", "ruff, not None"]
    with pytest.raises(AssertionError, match="an option"):
        entries("--index-url https://example.org\n")
    with pytest.raises(SystemExit, match="names no clang-format, pyyaml, ruff; add it"):
        empty = {"dependencies": [], "optional-dependencies": {}}
        make_locks.inputs("lint", {"project": empty, "build-system": {"requires": []}})


def test_every_development_tool_is_in_a_lock():
    held = {make_locks.normal(name) for names in make_locks.LOCKS.values() for name in names}
    assert set(make_locks.declared(PROJECT)) == held


def test_unknown_locks_are_refused(capsys):
    with pytest.raises(SystemExit):
        make_locks.main(["tests"])
    assert "tests is no lock; there are lint, test, gpu, wheels, site, integrations." in capsys.readouterr().err
