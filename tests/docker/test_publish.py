# SPDX-License-Identifier: Apache-2.0
"""ci/publish_image: what it hands to bake, and the digests that it hands on to be signed. docker is a stand-in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "ci")]

import matrix  # noqa: E402
import publish  # noqa: E402

DOCKER = """import json, os, sys
place = sys.argv[sys.argv.index("--metadata-file") + 1]
with open(os.environ["SEEN"], "w") as file:
    json.dump({"words": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}, file)
if os.environ.get("FAILS"):
    sys.exit(3)
with open(place, "w") as file:
    digits = {"runtime": "a", "test": "b"}
    json.dump({name: {"containerimage.digest": "sha256:" + d * 64} for name, d in digits.items()}, file)
"""


@pytest.fixture
def world(tmp_path) -> dict[str, str]:
    """An environment with that docker and the variables of a workflow."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    script = tmp_path / "docker.py"
    script.write_text(DOCKER)
    words = shlex.join([sys.executable, str(script)])  # a path with a space cannot stand behind #!
    docker.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    docker.chmod(0o755)
    path = f"{docker.parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "SEEN": str(tmp_path / "seen.json"), "GITHUB_OUTPUT": str(tmp_path / "output")}
    forge = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "Some/Name"}
    return {**os.environ, **own, **forge, "MAGI_PYTHON": sys.executable}


def call(world: dict[str, str], dist: Path, *more: str) -> subprocess.CompletedProcess:
    command = [str(ROOT / "ci" / "publish_image"), "Registry.example/Some/Name", "--dist", str(dist), *more]
    return subprocess.run(command, env=world, capture_output=True, text=True, timeout=DEADLINE_S)


def test_what_is_built_and_handed_on(tmp_path, world):
    (tmp_path / "magi_attention-1.0-py3-none-any.whl").touch()
    done = call(world, tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["words"][:5] == ["buildx", "bake", "--file", "docker/bake.hcl", "--push"] and seen["cwd"] == str(ROOT)
    wanted = {**matrix.bake_variables(matrix.load()), "REPOSITORY": "registry.example/some/name"}
    wanted |= {"SOURCE": "https://example.org/Some/Name", "DIST": tmp_path.as_posix()}
    assert wanted.items() <= seen["environment"].items()
    images = {name: f"registry.example/some/name@sha256:{d * 64}" for name, d in (("runtime", "a"), ("test", "b"))}
    assert (tmp_path / "output").read_text() == "".join(f"{name}={image}\n" for name, image in images.items())
    assert all(f"{name}={image}" in done.stdout for name, image in images.items())


def test_nothing_is_handed_on_where_the_build_fails(tmp_path, world):
    (tmp_path / "magi_attention-1.0-py3-none-any.whl").touch()
    assert call({**world, "FAILS": "1"}, tmp_path).returncode == 3
    assert not (tmp_path / "output").exists()


def test_sentences_before_the_build(tmp_path, world, monkeypatch):
    done = call(world, tmp_path)
    assert done.returncode == 1 and "has no wheel of magi_attention" in done.stderr
    monkeypatch.setattr(matrix, "bake_variables", lambda data, machine: {"BASE_DIGEST": ""})
    with pytest.raises(SystemExit, match="names its base by digest"):
        publish.variables("x", tmp_path)


def test_every_shown_line_of_bake_says_where_the_image_goes():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    lines = [
        line
        for name in names
        if name.endswith((".md", ".hcl", ".yml")) and (ROOT / name).is_file()
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "docker buildx bake" in line
    ]
    assert lines or not names
    assert all("--push" in line or "--load" in line for line in lines), lines
