# SPDX-License-Identifier: Apache-2.0
"""ci/build_wheels, as far as it goes without building: what it takes, what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import check_wheel
import matrix
import pytest
import try_install

import build
from magi_attention.native import info
from magi_attention.version import __version__

ROOT = Path(__file__).resolve().parents[2]
DATA = matrix.load()


def test_an_export_has_what_git_knows_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    (source / "build").mkdir(parents=True)
    (source / "build" / "object.o").write_text("kept")
    (source / "magi_attention" / "lib").mkdir(parents=True)
    (source / "magi_attention" / "lib" / "libmagi_ffa_sm90.so").write_text("left over")
    names = ["setup.py", "ci/build_wheels", "csrc/include/magi/abi.h"]
    build.export(names, source)
    found = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    assert found == sorted([*names, "build/object.o"])
    assert os.access(source / "ci" / "build_wheels", os.X_OK) and not os.access(source / "setup.py", os.X_OK)
    stamp = (source / "setup.py").stat().st_mtime_ns
    build.export(names, source)
    assert (source / "setup.py").stat().st_mtime_ns == stamp


def test_two_builds_of_a_checkout_that_changed_are_not_compared(monkeypatch, tmp_path, capsys):
    wheel = tmp_path / "magi_attention-1.whl"
    wheel.write_text("")
    monkeypatch.setattr(build, "build_here", lambda *args, **kwargs: [wheel])
    monkeypatch.setattr(build, "environment_of", lambda *args: Path(sys.executable))
    monkeypatch.setattr(build, "check_wheels", lambda *args: 0)
    monkeypatch.setattr(build, "find_python", lambda version: Path(sys.executable))
    revisions = [("abc", "1"), ("abc", "1"), ("abc", "1"), ("abc-dirty", "1")]
    monkeypatch.setattr(build, "revision", lambda: revisions.pop(0))
    assert build.main(["--twice"]) == 0 and "built twice: 1 equal, 0 differ" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="The checkout changed while wheels were built"):
        build.main(["--twice"])


def test_what_the_wheels_need_of_others(tmp_path):
    with pytest.raises(SystemExit, match="has no wheel of magi_attention; run ci/build_wheels"):
        try_install.needs(tmp_path)
    with zipfile.ZipFile(tmp_path / "magi_attention-1-py3-none-any.whl", "w") as wheel:
        needs = ["torch>=2.9", 'tomli; python_version < "3.11"', 'magi-attention-kernels-sm90-cu13==1; extra == "sm90"']
        wheel.writestr("magi_attention-1.dist-info/METADATA", "".join(f"Requires-Dist: {need}\n" for need in needs))
    assert try_install.needs(tmp_path) == needs[:2]


def test_what_cannot_be_built_is_said(monkeypatch, capsys):
    monkeypatch.setattr(build, "toolkits", lambda homes: {})
    monkeypatch.setattr(build, "find_python", lambda version: None if version == "3.14" else Path("/python") / version)
    assert build.main(["--only", "magi-attention-kernels-sm90-cu13"]) == 1
    out = capsys.readouterr().out
    assert "there is no nvcc of CUDA 13; name a toolkit by --cuda-home" in out and "nothing was built" in out
    given = {"only": ["magi_attention"], "python": None, "cuda_home": [], "record": None, "machine": build.HERE}
    options = type("Options", (), given)
    assert [version for _, version, _, _ in build.plan(options)] == DATA["pythons"][:-1]
    assert "for Python 3.14 is left out" in capsys.readouterr().out


def test_cibuildwheel_understands_them(capsys):
    pytest.importorskip("cibuildwheel")
    seen = set()
    for wheel in matrix.wheels(DATA):
        settings = {k: v for k, v in matrix.cibuildwheel(wheel, DATA).items() if v}
        told = settings["CIBW_BUILD"], settings["CIBW_ARCHS"], wheel.folder
        if told in seen:
            continue  # another family or CUDA, of which these identifiers say nothing
        seen.add(told)
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
        environment = {**os.environ, **settings}
        done = subprocess.run([*command, wheel.folder], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == settings["CIBW_BUILD"].split()


def test_the_project_of_kernels_refuses_what_it_cannot_build(tmp_path):
    def said(**environment: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MAGI_WHEEL")}
        command = [sys.executable, "setup.py", "--version"]
        done = subprocess.run(
            command, cwd=ROOT / "wheels" / "kernels", env={**clean, **environment}, capture_output=True, text=True
        )
        return done.stderr if done.returncode else ""

    # Only asked: setuptools cannot be imported into a process that has imported distutils of the standard library.
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setup.py needs setuptools 77")
    assert "MAGI_WHEEL_ARCH is ''; set it to one with sources here: sm80, sm90, sm100, sm120" in said()
    assert "MAGI_WHEEL_ARCH is 'sm70'" in said(MAGI_WHEEL_ARCH="sm70")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    for release, asked, words in (
        ("11.8", "", "is of CUDA 11.8, and cu11 needs one of ci/matrix.json"),
        ("12.0", "", "is of CUDA 12.0, and cu12 needs 12.4 or newer"),
        ("13.0", "cu12", "is of CUDA 13.0, and cu12 needs"),
    ):
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
        assert words in said(MAGI_WHEEL_ARCH="sm90", CUDA_HOME=str(tmp_path), MAGI_WHEEL_CUDA=asked)


def test_tags_must_fit_the_version(tmp_path, capsys):
    """And pages and errors must name the index of the release, as they do not before the first."""
    package = tmp_path / "magi_attention"
    (package / "native").mkdir(parents=True)
    shutil.copy(ROOT / "magi_attention" / "version.py", package)
    source = (ROOT / "magi_attention" / "native" / "install.py").read_text()
    line = 'RELEASE_INDEX = "https://example.org/"'
    text, count = re.subn('^RELEASE_INDEX = ".*?"', line, source, flags=re.MULTILINE)
    assert count == 1
    (package / "native" / "install.py").write_text(text)
    assert matrix.check_tag(f"refs/tags/v{__version__}", tmp_path) == 0
    assert matrix.check_tag("refs/tags/v0.0.1", tmp_path) == 1
    assert f"is not the tag of version {__version__}" in capsys.readouterr().err
    (package / "native" / "install.py").write_text(text.replace("https://example.org/", ""))
    assert matrix.check_tag(f"refs/tags/v{__version__}", tmp_path) == 1
    assert "RELEASE_INDEX" in capsys.readouterr().err
    assert matrix.main(["--tag", "refs/heads/main"]) == 0 == matrix.check_tag("refs/heads/main", tmp_path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_portable_linker_makes_libraries_for_the_platform(tmp_path):
    pytest.importorskip("ziglang")
    source = tmp_path / "x.cpp"
    source.write_text("#include <memory>\n#include <dlfcn.h>\nextern \"C\" void* magi_x() "
                      "{ return std::make_shared<int>(1) ? dlsym(nullptr, \"x\") : nullptr; }\n")  # fmt: skip
    cxx, out = str(ROOT / "wheels" / "portable_cxx"), str(tmp_path / "x.so")
    subprocess.run([cxx, "-fPIC", "-c", str(source), "-o", str(tmp_path / "x.o")], check=True)
    subprocess.run([cxx, "-shared", "-Xlinker", "-s", str(tmp_path / "x.o"), "-o", out], check=True)
    listed = subprocess.run(["readelf", "-VW", out], capture_output=True, text=True, check=True).stdout
    newest = max(map(matrix.version, re.findall(r"GLIBC_(\d[\d.]*)", listed)))
    assert newest <= matrix.version(DATA["platforms"][build.HERE]["glibc"])


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_planner_is_cross_compiled_and_read_back(tmp_path):
    """For the other machine, by the linker of the wheels; the record is read although nothing can be loaded."""
    pytest.importorskip("ziglang")
    (other,) = set(DATA["platforms"]) - {build.HERE}
    row = DATA["platforms"][other]
    if not shutil.which(row["compiler"]):
        pytest.skip(f"needs {row['compiler']}; on Debian `apt-get install g++-{other.replace('_', '-')}-linux-gnu`")
    environment = build.build_environment(Path(sys.executable), ROOT, True, other)
    code = (
        "import sys\nfrom pathlib import Path\nfrom magi_attention.native import build\n"
        "build.build_all('planner', lib=Path(sys.argv[1]), folder=Path(sys.argv[1], 'objects'))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    library = tmp_path / "libmagi_planner.so"
    assert check_wheel.elf_machine(library) == check_wheel.ELF_MACHINES[other]
    assert info.read_info(library).version == __version__
    wheel = matrix.find("magi_attention", DATA, machine=other)
    found = check_wheel.check_library(library, wheel, row["glibc"], __version__)
    assert found == [] or "has no git revision" in found[0] and len(found) == 1
