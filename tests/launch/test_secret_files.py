# SPDX-License-Identifier: Apache-2.0
"""Where values of secret variables are kept, who may read them, and what people send to others."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest
from launching import stand_in

from magi_attention.cli import doctor, main

SECRET = 'it\'s a "s3cr3t"\nof two lines'
PROGRAMS = {"sbatch": "print(123)", "squeue": "", "kubectl": "print('yes')", "scancel": ""}


@pytest.fixture
def queues(tmp_path, monkeypatch):
    """A home, and programs of both queues that do nothing."""
    for name, text in PROGRAMS.items():
        stand_in(tmp_path / "bin", name, text)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MAGI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLURM_JWT_TOKEN", SECRET)  # one of those that a report shows, and a secret
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "sessions"


def run(engine: str) -> None:
    words = ["--engine", engine, "--name", "one", "--image", "i"]
    for variable in (f"HF_TOKEN={SECRET}", "DB_PASS=abcd", "HTTPS_PROXY=http://me:pa55word@proxy:1"):
        words += ["--env", variable]
    assert main(["up", *words]) == 0
    assert main(["run", "--session", "one", "train.py"]) == 0


def held(path: Path) -> bool:
    text = path.read_text()
    return "s3cr3t" in text or "abcd" in text or "pa55word" in text


@pytest.mark.parametrize("engine", ["slurm", "k8s"])
def test_files_of_a_session(queues, engine, monkeypatch):
    old = os.umask(0)  # the most careless one
    try:
        run(engine)
    finally:
        os.umask(old)
    folder = queues / "one"
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    holder = "secrets.env" if engine == "slurm" else "secrets.json"
    assert {path.name for path in files if held(path)} == {"session.json", holder}
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600 or path.name in ("lock", "reserve"), path


@pytest.mark.parametrize("engine", ["slurm", "k8s"])
def test_an_archive_for_a_bug_report(queues, engine, tmp_path, monkeypatch):
    """Not even what a rank printed of them is in it."""
    run(engine)
    folder = queues / "one" / "runs" / "001"
    lines = ["token", *SECRET.splitlines(), "password abcd at http://me:pa55word@proxy:1, abcde"]
    log = "".join(f"[rank 0]: {line}\n" for line in lines) + "\udcff"
    (folder / "output.log").write_text(log, errors="surrogateescape")
    monkeypatch.setattr(doctor.registry, "examine", lambda *arguments: [])  # the slow part
    monkeypatch.setattr(sys, "argv", ["magi", "collect-env", f"HF_TOKEN={SECRET}"])
    out = tmp_path / "report.tar.gz"
    assert main(["collect-env", "--session", "one", "--output", str(out)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as archive:
        texts = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert {"environment.json", "run.json", "output.log"} < set(texts)
    for name, text in texts.items():
        assert not [w for w in (b"s3cr3t", b"of two lines", b"abcd ", b"pa55word") if w in text], (name, text)
    assert b"token" in texts["output.log"] and b"http://(left out)@proxy:1, abcde" in texts["output.log"]
    assert texts["output.log"].endswith(b"\xff"), "what is no UTF-8 stays as it is"
    assert b"(left out)" in texts["environment.json"]


def test_a_session_that_was_open_to_all_is_closed(queues):
    (queues / "one").mkdir(parents=True)
    (queues / "one").chmod(0o755)
    (queues / "one" / "session.json").write_text('{"state": "down", "is_implicit": false, "created": 0, "spec": {}}')
    run("slurm")
    assert (queues / "one").stat().st_mode & 0o777 == 0o700
    assert (queues / "one" / "session.json").stat().st_mode & 0o777 == 0o600
