# SPDX-License-Identifier: Apache-2.0
"""docker/install.py holds what the base has, and notices where torch became another."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker"))

import install  # noqa: E402


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """A folder that stands for torch's."""
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libtorch.so").write_bytes(b"one")
    spec = argparse.Namespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(install.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(install, "NOTE", tmp_path / "note")
    return folder


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(
        **{"wheels": None, "cuda": "cu13", "nvshmem": "", "constraints": None, "more": [], **given}
    )


def test_fingerprint_sees_every_byte_and_name(fake_torch):
    before = install.fingerprint()
    (fake_torch / "__pycache__").mkdir()
    (fake_torch / "__pycache__" / "x.pyc").write_bytes(b"compiled when it is first imported")
    assert install.fingerprint() == before
    (fake_torch / "lib" / "libtorch.so").write_bytes(b"two")
    changed = install.fingerprint()
    assert changed != before and changed["version"] == before["version"]
    (fake_torch / "lib" / "libtorch.so").write_bytes(b"one")
    (fake_torch / "lib" / "libtorch.so").rename(fake_torch / "lib" / "other.so")
    assert install.fingerprint() != before


def test_another_torch_ends_the_build(fake_torch, monkeypatch):
    calls = []

    def pip(*words):
        calls.append(words)
        (fake_torch / "lib" / "libtorch.so").write_bytes(b"two")

    monkeypatch.setattr(install, "pip", pip)
    with pytest.raises(SystemExit, match="another torch than its base"):
        install.install(options(more=["pytest"]))
    assert calls and calls[0][-1] == "pytest"


def test_a_package_of_the_base_stays(fake_torch, monkeypatch):
    rows = iter([{"numpy": "2.0"}, {"numpy": "2.1"}])
    monkeypatch.setattr(install, "installed", lambda: next(rows))
    with pytest.raises(SystemExit, match="The base had numpy 2.0"):
        install.install(options())


def test_constraints_hold_what_is_there(tmp_path, monkeypatch):
    file = tmp_path / "constraints.txt"
    file.write_text('# words\ntorch==2.13.0\nnot_there==1.2; python_version >= "3.11"\n')
    seen = []
    monkeypatch.setattr(install, "installed", lambda: {"torch": "2.12.0a0+5aff", "numpy": "2.0"})
    monkeypatch.setattr(install, "pip", lambda *words: seen.append(Path(words[1]).read_text().splitlines()))
    install.add(["rich"], options(constraints=file, nvshmem="3.4.5"))
    wanted = [
        'not_there==1.2; python_version >= "3.11"',
        "nvidia-nvshmem-cu13==3.4.5",
        "torch==2.12.0a0+5aff",
        "numpy==2.0",
    ]
    assert seen == [wanted]


def test_wheels_are_all_there_and_of_one_version(tmp_path):
    def put(*names):
        for name in names:
            (tmp_path / f"{name}-py3-none-any.whl").touch()

    with pytest.raises(SystemExit, match="nothing of ours; an image needs .*ci/build_wheels"):
        install.our_wheels(tmp_path, "cu13")
    put("magi_attention-1.0", "magi_attention_kernels_sm90_cu13-1.0", "magi_attention_kernels_sm90_cu12-0.9")
    with pytest.raises(SystemExit, match="collectives for cu13"):
        install.our_wheels(tmp_path, "cu13")
    put("magi_attention_comm_cu13-1.0")
    names = ["magi_attention", "magi_attention_comm_cu13", "magi_attention_kernels_sm90_cu13"]
    assert install.our_wheels(tmp_path, "cu13") == dict.fromkeys(names, "1.0")
    # A release has the wheels of every machine in one folder.
    (tmp_path / "magi_attention_kernels_sm80_cu13-0.7-py3-none-manylinux_2_28_other.whl").touch()
    here = f"magi_attention_kernels_sm100_cu13-1.0-py3-none-manylinux_2_28_{platform.machine()}.whl"
    (tmp_path / here).touch()
    assert set(install.our_wheels(tmp_path, "cu13")) == {*names, "magi_attention_kernels_sm100_cu13"}
    put("magi_attention_comm_cu13-1.1")
    with pytest.raises(SystemExit, match="versions 1.0, 1.1"):
        install.our_wheels(tmp_path, "cu13")


def test_missing_is_what_nothing_meets(monkeypatch):
    needs = ["torch>=2.9", "numpy", "rich>=13", "matplotlib; extra == 'report'", "mypy; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    monkeypatch.setattr(install, "installed", lambda: {"torch": "2.12.0a0+5aff", "numpy": "2.0"})
    assert install.missing(["any"]) == ["rich>=13", "matplotlib"]
    monkeypatch.setattr(install, "installed", lambda: {"torch": "2.8", "numpy": "2.0", "rich": "14"})
    with pytest.raises(SystemExit, match="the base has 2.8; build on another base"):
        install.missing(["any"])
