# SPDX-License-Identifier: Apache-2.0
"""Which torch `./magi` takes on a machine without a GPU, with indexes of this test's own on 127.0.0.1.

PyPI is out of reach in all of them: requests to it go to a proxy port at which nobody listens.
"""

from __future__ import annotations

import http.server
import importlib.machinery
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import small_wheels

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.search(r"^torch==(\S+)", (ROOT / "ci" / "constraints.txt").read_text(), re.MULTILINE)[1]
CPU = f"{PINNED}+cpu"

# A checkout that installs without any package: its build backend is its own.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
from small_wheels import write_wheel

def build_editable(folder, config_settings=None, metadata_directory=None):
    body = "from importlib.metadata import version; print('started beside torch', version('torch'))"
    extras = "Provides-Extra: dev\\nProvides-Extra: report\\nRequires-Dist: torch\\n"
    return write_wheel(folder, "magi_attention", "1", {"magi_attention/cli.py": body}, extras).name
"""


class Index:
    """A simple index over HTTP with one wheel of torch per version; ``asked`` are the paths of requests."""

    def __init__(self, folder: Path, *versions: str):
        (folder / "torch").mkdir(parents=True)
        files = {version: {"torch.py": f"__version__ = {version!r}"} for version in versions}
        names = [small_wheels.write_wheel(folder / "torch", "torch", v, files[v]).name for v in versions]
        links = "".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>\n' for name in names)
        (folder / "torch" / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
        self.folder, self.asked = folder, []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(handler, *args):
                super().__init__(*args, directory=str(folder))

            def log_message(handler, *args):
                self.asked.append(handler.path)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def index(tmp_path):
    """Makes indexes that end with the test."""
    made = []

    def make(*versions: str) -> Index:
        made.append(Index(tmp_path / f"index{len(made)}", *versions))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture
def closed_port():
    with socket.socket() as bound:  # without listen(), so that every connection is refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def settings(monkeypatch, closed_port, tmp_path):
    """An environment as of a user without any settings of pip's, and without PyPI."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "MAGI_", "PYTHONPATH")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python that has pip: the one of the tests, or where it has none that of a new virtual environment."""
    if importlib.util.find_spec("pip") and not Path(sys.prefix, "pip.conf").exists():
        return sys.executable
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def launcher(python, settings):
    """The launcher as a module; its environment is that of ``python``."""
    loader = importlib.machinery.SourceFileLoader("magi_launcher", str(ROOT / "magi"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("magi_launcher", loader))
    loader.exec_module(module)
    module.PYTHON = python
    settings.setattr(module, "has_gpu", lambda: False)
    settings.setattr(module.sys, "platform", "linux")
    settings.setattr(module, "PIP_SECONDS", 300)  # a busy machine is no unreachable one
    return module


def test_pytorchs_index_is_asked_where_pip_has_no_settings(launcher, settings, index, capsys):
    pytorch = index(PINNED, CPU, "99.0+cpu")
    settings.setattr(launcher, "TORCH_INDEX", pytorch.url)
    arguments, words = launcher.choose_torch()
    assert arguments == ["--no-deps", "--index-url", pytorch.url, f"torch=={CPU}"]
    assert words == f"torch {CPU} of {pytorch.url}" and capsys.readouterr().err == ""
    assert pytorch.asked and not any(path.endswith(".whl") for path in pytorch.asked), "only the list is read"


def test_an_index_that_is_not_there(launcher, settings, closed_port, capsys):
    settings.setattr(launcher, "TORCH_INDEX", f"http://127.0.0.1:{closed_port}")
    assert launcher.choose_torch() == (["torch"], "")
    said = capsys.readouterr().err
    assert f"127.0.0.1:{closed_port} has none for" in said and "or cannot be reached" in said
    assert "2.7 GB" in said and "MAGI_TORCH_INDEX" in said and "Ctrl-C" in said and said.count("\n") == 1


def test_an_index_that_never_answers(launcher, settings, capsys):
    settings.setattr(launcher, "INDEX_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings.setattr(launcher, "TORCH_INDEX", url)
        assert launcher.choose_torch() == (["torch"], "")
        silent.settimeout(1)
        silent.accept()[0].close()  # it was asked
    assert f"{url} has none" in capsys.readouterr().err


def test_an_index_without_that_version(launcher, settings, index, capsys):
    settings.setattr(launcher, "TORCH_INDEX", index(PINNED, "1.0+cpu").url)
    assert launcher.choose_torch() == (["torch"], "")
    assert "has none for" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_who_has_an_index_is_not_sent_to_another(launcher, settings, index, name, capsys):
    mine, pytorch = index(PINNED), index(CPU)
    settings.setenv(name, mine.url)
    settings.setattr(launcher, "TORCH_INDEX", pytorch.url)
    assert launcher.choose_torch() == (["torch"], "")
    said = capsys.readouterr().err
    setting = name.removeprefix("PIP_").lower().replace("_", "-")
    assert f"pip's settings ({setting}) offer no torch {CPU}" in said and "2.7 GB" in said
    assert mine.asked and not pytorch.asked
    settings.setenv("MAGI_TORCH_INDEX", pytorch.url)  # unless by the user's own word
    assert launcher.choose_torch()[0] == ["--no-deps", "--index-url", pytorch.url, f"torch=={CPU}"]


@pytest.mark.parametrize("in_file", [False, True])
def test_what_the_users_index_offers_is_taken(launcher, settings, index, tmp_path, in_file, capsys):
    mine, pytorch = index(PINNED, CPU), index(CPU)
    if in_file:
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {mine.url}\n")
        settings.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    else:
        settings.setenv("PIP_INDEX_URL", mine.url)
    settings.setattr(launcher, "TORCH_INDEX", pytorch.url)
    assert launcher.choose_torch() == ([f"torch=={CPU}"], f"torch {CPU}, which pip's settings offer")
    assert mine.asked and not pytorch.asked and capsys.readouterr().err == ""


def test_offline(launcher, settings, index, capsys):
    pytorch = index(CPU)
    settings.setattr(launcher, "TORCH_INDEX", pytorch.url)
    settings.setenv("PIP_NO_INDEX", "1")
    assert launcher.choose_torch() == (["torch"], "")
    assert "pip's settings (no-index)" in capsys.readouterr().err
    settings.setenv("PIP_FIND_LINKS", str(pytorch.folder / "torch"))
    assert launcher.choose_torch() == ([f"torch=={CPU}"], f"torch {CPU}, which pip's settings offer")
    settings.setenv("PIP_NO_INDEX", "0")  # pip reads it as "indexes are allowed"
    assert launcher.choose_torch()[0] == [f"torch=={CPU}"]
    assert not pytorch.asked


def test_other_machines_are_left_alone(launcher, settings, index, capsys):
    pytorch = index(CPU)
    settings.setattr(launcher, "TORCH_INDEX", pytorch.url)
    settings.setattr(launcher, "has_gpu", lambda: True)
    assert launcher.choose_torch() == (["torch"], "")
    settings.setattr(launcher, "has_gpu", lambda: False)
    settings.setattr(launcher.sys, "platform", "darwin")
    assert launcher.choose_torch() == (["torch"], "")
    settings.setattr(launcher.sys, "platform", "linux")
    settings.setenv("MAGI_TORCH_INDEX", "")
    assert launcher.choose_torch() == (["torch"], "")
    assert not pytorch.asked and "MAGI_TORCH_INDEX is empty" in capsys.readouterr().err


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the launcher and next to nothing to install."""
    folder = tmp_path / "checkout"
    (folder / "ci").mkdir(parents=True)
    for name in ("magi", "setup.py", "ci/constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes() if name != "setup.py" else b"")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    shutil.copy(small_wheels.__file__, folder)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(
    os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0"),
    reason="with a GPU the launcher takes torch as it is",
)
def test_a_first_start(checkout, settings, index):
    """The environment is made with the CPU build, and a second start only starts."""
    pytorch = index(PINNED, CPU)
    settings.setenv("MAGI_TORCH_INDEX", pytorch.url)

    def start():
        command = [sys.executable, str(checkout / "magi"), "version"]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"started beside torch {CPU}\n"
    chosen = [line for line in done.stderr.splitlines() if f"torch {CPU} of {pytorch.url}: Downloading" in line]
    assert len(chosen) == 1 and re.search(r"torch-.*\.whl \([\d.]+ (bytes|kB)\)", chosen[0]), done.stderr
    assert re.search(r"environment ready after \d+ s; \d+ MB were downloaded", done.stderr)
    assert "part 1 of 2" in done.stderr and "part 2 of 2: `magi" in done.stderr
    loaded = [path for path in pytorch.asked if path.endswith(".whl")]
    assert loaded == [f"/torch/torch-{PINNED}%2Bcpu-py3-none-any.whl"]
    pytorch.asked.clear()
    again = start()
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "") and not pytorch.asked
    # After a change that leaves torch at its version no torch is looked for.
    with (checkout / "ci" / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    changed = start()
    assert changed.returncode == 0 and "bringing .venv up to date" in changed.stderr, changed.stderr
    assert changed.stdout == done.stdout and not pytorch.asked


def lines_of(launcher, is_live: bool, lines, settings, chosen="", columns=200, installed=None) -> list[str]:
    """What the display writes for lines of pip's, one a second."""
    written: list[str] = []

    class Stderr:
        write = staticmethod(written.append)
        flush = staticmethod(lambda: None)
        isatty = staticmethod(lambda: is_live)

    settings.setenv("COLUMNS", str(columns))
    settings.setattr(launcher.sys, "stderr", Stderr)
    display = launcher.Display(0, chosen, installed or (lambda: 0))
    for line in lines:
        display.take(line)
        display.refresh()
    return written


WHEEL = "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl"
ARRIVING = [
    "Collecting torch==2.13.0+cpu",
    f"Downloading https://example.org/{WHEEL}.metadata (29 kB)",
    f"Downloading https://example.org/{WHEEL} (200.0 MB)",
    *(f"Progress {part * 10**6} of {200 * 10**6}" for part in range(201)),
    "Downloading small-1-py3-none-any.whl (21 kB)",
    "Progress 0 of 21000",
    "Progress 21000 of 21000",
    "Installing collected packages: torch",
]


def test_lines_where_the_output_is_no_terminal(launcher, settings):
    said = lines_of(launcher, False, ARRIVING, settings, f"torch {CPU} of example.org")
    assert said[0] == f"magi: torch {CPU} of example.org: Downloading https://example.org/{WHEEL} (200.0 MB)\n"
    assert said[1:-1] == [f"magi: {part} of 200 MB have arrived\n" for part in range(20, 201, 20)]
    assert said[-1] == "magi: Installing collected packages: torch\n"


def test_slow_arrival_is_told_by_time(launcher, settings):
    clock = iter(range(0, 10**6, 4))
    settings.setattr(launcher.time, "time", lambda: float(next(clock)))
    slow = [ARRIVING[2], *(f"Progress {part * 10**5} of {200 * 10**6}" for part in range(60))]
    said = lines_of(launcher, False, slow, settings)
    assert 10 < len(said) < 60 and "of 200 MB have arrived, about " in said[-1]


@pytest.mark.parametrize("is_live", [False, True])
def test_time_left_is_that_of_the_pace_so_far(launcher, settings, is_live):
    """A file of 200 MB at 1 MB/s, then 40 packages, one every 2 s, where 7 were there before."""
    now = [0.0]
    settings.setattr(launcher.time, "time", lambda: now[0])
    arriving = [ARRIVING[2], *(f"Progress {part * 10**6} of {200 * 10**6}" for part in range(201))]
    names = ", ".join(f"package{number}" for number in range(40))
    installing = [f"Installing collected packages: {names}", *["still busy"] * 80]
    there = [7]

    def lines():
        for line in arriving:
            yield line
            now[0] += 1
        began = now[0]
        for line in installing:
            there[0] = 7 + int(now[0] - began) // 2
            yield line
            now[0] += 1

    said = lines_of(launcher, is_live, lines(), settings, installed=lambda: there[0])
    found = [
        tuple(map(int, match.groups()))
        for match in (re.search(r"(\d+) of (200 MB|40 packages).*?, about (\d+) s left", text) for text in said)
        for match in [match and re.match(r"(\d+) of (\d+).*about (\d+)", match[0])]
        if match
    ]
    loads, packages = [row for row in found if row[1] == 200], [row for row in found if row[1] == 40]
    assert len(loads) >= 9 and all(left == 200 - done for done, _, left in loads)
    assert len(packages) >= 5
    assert all(abs(left - 2 * (40 - done)) <= 40 / done + 1 for done, _, left in packages), packages


def test_no_time_is_guessed_at_the_start(launcher, settings):
    assert not any("left" in text for text in lines_of(launcher, True, ARRIVING[:5], settings))


def test_a_bar_on_a_terminal(launcher, settings):
    shown = lines_of(launcher, True, ARRIVING, settings, f"torch {CPU} of example.org")
    assert f"magi: torch {CPU} of example.org: Downloading https://example.org/{WHEEL} (200.0 MB)\n" in shown
    assert any(f"[##########..........] 100 of 200 MB  {WHEEL}" in text for text in shown)
    assert all(len(text) < 60 for text in lines_of(launcher, True, ARRIVING, settings, columns=50)[:-1])
