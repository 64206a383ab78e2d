# SPDX-License-Identifier: Apache-2.0
"""Writes ci/lock/*.txt: the exact versions of what the CI lanes install, with the hashes of their files.

    pip install uv && ci/make_locks [NAME ...]

Names and ranges come from pyproject.toml, versions from ci/constraints.txt, and what neither says keeps the version
that the lock has. One lock serves every Python of ci/matrix.json. Names, versions and hashes are written, no index.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "ci" / "lock"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
# lock -> what it must hold, as named in pyproject.toml
LOCKS: dict[str, tuple[str, ...]] = {
    "lint": ("clang-format", "pyyaml", "ruff"),
    "test": (
        *("torch", "numpy", "rich", "tomli", "setuptools"),
        *("cyclonedx-python-lib", "hypothesis", "kubernetes-validate", "matplotlib", "mypy", "ninja", "pybind11"),
        *("pytest", "pytest-xdist", "pyyaml", "uv"),
    ),
    # Beside a torch and a numpy that are there: those of a GPU machine fit its driver.
    "gpu": ("rich", "tomli", "setuptools", "hypothesis", "ninja", "pybind11", "pytest", "pyyaml"),
    "wheels": ("cibuildwheel",),
    "site": ("mkdocs-material", "mkdocstrings"),
    # Beside what "test" has.
    "integrations": ("accelerate", "torch", "transformers", "trl"),
}
BESIDE = {"integrations": "test"}
PYTHONS = {"integrations": "3.11", "site": "3.11"}  # older ones have no such packages
BACKENDS = ("cudnn-flex", "fa4")
HEADER = "# Made by ci/make_locks from pyproject.toml and ci/constraints.txt; edit those and run it again.\n"


def normal(name: str) -> str:
    """The name by which an index knows a project."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(project: dict) -> dict[str, str]:
    """Requirements of pyproject.toml by project: of the package, its extras and its build; of ours none, and none of
    optional backends, which CI does not install."""
    extras = project["project"]["optional-dependencies"]
    lists = [project["project"]["dependencies"], *(lines for name, lines in extras.items() if name not in BACKENDS)]
    lists.append(project["build-system"]["requires"])
    found = {}
    for line in (line for lines in lists for line in lines):
        name = normal(re.match(r"[\w.-]+", line)[0])
        if not name.startswith("magi-attention"):
            found[name] = line
    return found


def oldest_python(project: dict) -> str:
    """Such as 3.10."""
    return re.fullmatch(r">=(3\.\d+)", project["project"]["requires-python"])[1]


def inputs(lock: str, project: dict) -> list[str]:
    """Requirement lines of a lock; a sentence if pyproject.toml has no such name."""
    known = declared(project)
    if absent := [name for name in LOCKS[lock] if name not in known]:
        raise SystemExit(f"ci/make_locks: pyproject.toml names no {', '.join(absent)}; add it, or take it from LOCKS.")
    return [known[name] for name in LOCKS[lock]]


def write(lock: str, project: dict) -> Path:
    """Makes one file anew."""
    path = FOLDER / f"{lock}.txt"
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text("\n".join(inputs(lock, project)) + "\n")
        kept = Path(folder) / path.name
        kept.write_text(path.read_text() if path.is_file() else "")
        line = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--universal"]
        line += ["--generate-hashes", "--no-header", "--no-annotate"]
        line += ["--python-version", PYTHONS.get(lock, oldest_python(project))]
        line += ["--constraints", str(CONSTRAINTS), "--output-file", str(kept), str(wanted)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            remedy = "`pip install uv` brings it" if "No module named uv" in done.stderr else "its words are above"
            print(done.stderr, file=sys.stderr)
            raise SystemExit(f"ci/make_locks: uv did not resolve {lock}; {remedy}.")
        there = names(FOLDER / f"{BESIDE[lock]}.txt") if lock in BESIDE else set()
        path.write_text(HEADER + "".join(e for e in entries(kept.read_text()) if name_of(e) not in there))
    return path


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def entries(text: str) -> list[str]:
    """A lock's requirements with their hashes."""
    return re.findall(r"^[\w.-]+==.*\n(?:    .*\n)*", text, re.MULTILINE)


def name_of(entry: str) -> str:
    return normal(entry.partition("==")[0])


def names(path: Path) -> set[str]:
    """What a lock holds."""
    return {name_of(entry) for entry in entries(path.read_text())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/make_locks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(LOCKS)}")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in LOCKS]:
        parser.error(f"{', '.join(unknown)} is no lock; there are {', '.join(LOCKS)}.")
    try:
        import tomllib
    except ImportError:
        raise SystemExit("ci/make_locks: this needs Python 3.11 or newer; name one in MAGI_PYTHON.") from None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in options.names or LOCKS:
        print(write(name, project).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
