# SPDX-License-Identifier: Apache-2.0
"""No command that this repository shows can fetch a package of our name from the public index.

Somebody else holds ``magi_attention`` there, and anybody may register the names of kernels and collectives.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import index
import pytest
from small_wheels import write_wheel

from magi_attention.native import install
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"magi[-_.]attention(?![\w.-]*/)|__version__|\{(name|record\.distribution|older)\}", re.IGNORECASE)
LINE = re.compile(r"(?:pip3?|uv) (?:pip )?(?:install|download|wheel|add)\b([^`\n]*)")
TEXT = {".md", ".py", ".toml", ".json", ".yml", ".yaml", ".sh", ".txt", ".hcl", ".html", ""}


def can_fetch(words: str) -> bool:
    """Would pip look for one of ours in the public index?"""
    if "--extra-index-url" in words:
        return True
    words = re.split(r";| then ", words)[0]
    return bool(OURS.search(words)) and not re.search(r"--no-index|--index-url|--no-deps (dist/|wheels/)", words)


def bad_lines(text: str) -> list[str]:
    """Commands of pip in a text that could fetch one of ours. A whole line counts, a backtick ends it."""
    return [found[0] for found in LINE.finditer(text) if can_fetch(found[1])]


def test_no_file_shows_one():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    # this file, and the one that puts the lines together, whose results pip itself tries below
    makers = {Path(file).relative_to(ROOT).as_posix() for file in (__file__, install.__file__)}
    files = [n for n in names if n and Path(n).suffix in TEXT and not n.startswith("docs/log/") and n not in makers]
    if not files:
        pytest.skip("needs the files that git knows")
    found = {}
    for name in files:
        if (path := ROOT / name).is_file() and (bad := bad_lines(path.read_text(encoding="utf-8", errors="replace"))):
            found[name] = bad
    assert not found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("run `pip install magi_attention` now", 1),
        ("`pip install 'magi_attention[sm90]'`", 1),
        ("pip install --find-links dist 'magi_attention[sm90]'", 1),
        ("pip install --extra-index-url URL 'magi_attention==1.1.1'", 1),
        ("uv pip install magi-attention-kernels-sm90-cu13==1.1.1", 1),
        ("f\"`pip install '{record.distribution}=={__version__}'`\"", 1),
        ("pip install --no-index --find-links dist magi_attention", 0),
        ("pip install --index-url URL 'magi_attention[sm90]==1.1.1'", 0),
        ("pip install --no-deps dist/magi_attention-*.whl", 0),
        ("pip install torch numpy", 0),
        ("`pip install -e .` installs magi_attention", 0),
    ],
)
def test_what_counts_as_one(text, count):
    assert len(bad_lines(text)) == count


def test_needs_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(install.NEEDS[""]) == {text.partition(";")[0].strip() for text in project["dependencies"]}
    ours = install.MAIN.replace("_", "-")
    for extra, packages in project["optional-dependencies"].items():
        others = [text for text in packages if not text.startswith(ours)]
        if extra in install.NEEDS:
            assert list(install.NEEDS[extra]) == others
        assert not others or len(others) == len(packages), f"{extra} mixes ours with others, which no one line installs"


# ---- pip itself, with an index on which others hold our names ----------------------------------------------------


def put(folder: Path, name: str, version: str, words: str, more: str = "") -> None:
    """A wheel with one module that says where it comes from."""
    write_wheel(folder, name, version, {f"said_by_{name}.py": f"WORDS = {words!r}\n"}, more)


KERNELS = "magi_attention_kernels_sm90_cu13"


@pytest.fixture
def world(tmp_path) -> Path:
    """A folder with our ``dist``, and a public index on which both names are somebody else's, also as newer ones."""
    extras = f"Provides-Extra: sm90\nRequires-Dist: {KERNELS}=={__version__}; extra == 'sm90'\n"
    put(tmp_path / "dist", install.MAIN, __version__, "ours", extras)
    put(tmp_path / "dist", KERNELS, __version__, "ours")
    for version in (install.PLACEHOLDER, __version__, "99.0"):
        put(tmp_path / "foreign", install.MAIN, version, "foreign", extras)
        put(tmp_path / "foreign", KERNELS, version, "foreign")
    index.write(tmp_path / "foreign", tmp_path / "public")
    index.write(tmp_path / "dist", tmp_path / "release")
    return tmp_path


def run_line(line: str, world: Path) -> tuple[int, dict[str, str]]:
    """Code of pip and, by module, what was installed into ``site``."""
    words = shlex.split(line)
    assert words[:2] == ["pip", "install"]
    command = [sys.executable, "-m", "pip", "install", "--target", str(world / "site"), "--no-cache-dir", *words[2:]]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    own = {"PIP_INDEX_URL": (world / "public").as_uri(), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, cwd=world, env={**kept, **own}, capture_output=True, text=True, timeout=DEADLINE_S)
    if "No module named pip" in done.stderr:
        pytest.skip("This Python has no pip.")
    return done.returncode, {p.stem: p.read_text().split("'")[1] for p in (world / "site").glob("said_by_*.py")}


LINES = (install.table_line("sm90"), install.ours("magi_attention[sm90]"), install.ours(again=True))


@pytest.mark.parametrize("line", [*LINES, "pip install magi_attention"])
def test_where_pip_takes_them_from(world, line):
    code, found = run_line(line, world)
    assert code == 0 and set(found.values()) == ({"ours"} if line in LINES else {"foreign"}), (line, found)
    assert len(found) == (2 if "sm90" in line else 1)


def test_nothing_comes_where_nothing_was_built(world):
    for wheel in (world / "dist").iterdir():
        wheel.unlink()
    assert run_line(install.table_line("sm90"), world) == (1, {})


def test_the_index_of_a_release(world, monkeypatch):
    monkeypatch.setattr(install, "RELEASE_INDEX", (world / "release").as_uri())
    line = install.table_line("sm90")
    assert f"=={__version__}" in line and "dist" not in line
    code, found = run_line(line, world)
    assert code == 0 and set(found.values()) == {"ours"} and len(found) == 2
