# SPDX-License-Identifier: Apache-2.0
"""What an editable install does with the native libraries: with a compiler that fails, and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.native import toolchain
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy without libraries, beside a CUDA toolkit whose nvcc fails."""
    if toolchain.find_ninja() is None:
        pytest.skip("needs ninja, without which nothing is compiled")
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "inst")
    for name in ("magi_attention", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    (copy / "wheels").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "wheels/wheel_sbom.py"):
        shutil.copy(ROOT / name, copy / name)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'this nvcc compiles nothing {x}'\nexit 1\n")
    nvcc.chmod(0o755)
    return copy


def install(checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    """What `pip install -e .` asks of setuptools. No host library is built."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAGI_ATTENTION_")}
    own = {"PATH": f"{checkout.parent / 'bin'}{os.pathsep}{kept['PATH']}", "CUDA_HOME": str(checkout.parent / "cuda")}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "editable_wheel", "-d", "dist"], cwd=checkout,
        env={**kept, "CXX": "no-such-compiler", **own, **environment},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


def put_smi(checkout: Path, capability: str) -> None:
    """An nvidia-smi that lists one GPU, or fails where there is none."""
    program = checkout.parent / "bin" / "nvidia-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho {capability}\n" if capability else "#!/bin/sh\nexit 9\n")
    program.chmod(0o755)


@pytest.mark.parametrize("capability", ["", "7.5"])
def test_without_a_gpu_no_kernel_is_compiled(checkout, capability):
    put_smi(checkout, capability)
    done = install(checkout)
    assert done.returncode == 0 and "this nvcc compiles nothing" not in done.stderr, done.stderr
    (notice,) = (line for line in done.stderr.splitlines() if "attention kernels were not built" in line)
    assert "no GPU" in notice and "when a call first needs it" in notice
    assert "MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY=90" in notice and "pip downloads" in done.stderr


def test_with_a_gpu_its_kernels_are_compiled(checkout):
    put_smi(checkout, "9.0")
    done = install(checkout)
    assert done.returncode != 0 and "this nvcc compiles nothing" in done.stderr


def test_a_gpu_without_kernels_that_is_asked_for_is_a_sentence(checkout):
    done = install(checkout, MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY="75")
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode != 0 and "no kernels for '75'" in sentence and "Traceback" not in done.stderr


def test_a_kernel_that_does_not_compile_fails_the_install(checkout):
    done = install(checkout, MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY="90")
    assert done.returncode != 0 and not list(checkout.glob("dist/*.whl")), done.stderr
    assert "this nvcc compiles nothing" in done.stderr and "Traceback" not in done.stderr
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "does not compile" in sentence and "MAGI_ATTENTION_PREBUILD_FFA=0" in sentence and "nvcc" in sentence
    done = install(checkout, MAGI_ATTENTION_PREBUILD_FFA="0")
    assert done.returncode == 0 and "because MAGI_ATTENTION_PREBUILD_FFA=0" in done.stderr, done.stderr
    assert list(checkout.glob("dist/*.whl")) and "this nvcc" not in done.stderr


def test_an_sdist_holds_what_a_build_reads(checkout, tmp_path):
    """A wheel that is made of it has every native source, as one that is made of the checkout."""
    generated = checkout / "csrc" / "ffa" / "sm90" / "inst" / "left_over.cu"
    generated.parent.mkdir(parents=True)
    generated.touch()
    environment = {**os.environ, "MAGI_ATTENTION_SKIP_CUDA_BUILD": "1"}

    def setup(folder: Path, *words: str) -> None:
        command = [sys.executable, "setup.py", "-q", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr

    setup(checkout, "sdist", "--dist-dir", "out")
    (archive,) = (checkout / "out").glob("magi_attention-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    want = {path.relative_to(checkout).as_posix() for path in toolchain.source_files(checkout / "csrc")}
    have = {path.relative_to(unpacked).as_posix() for path in (unpacked / "csrc").rglob("*") if path.is_file()}
    assert want and have == want and (unpacked / "wheels" / "wheel_sbom.py").is_file()
    setup(unpacked, "build_py", "--build-lib", "built")
    built = unpacked / "built" / "magi_attention"
    assert want == {path.relative_to(built).as_posix() for path in (built / "csrc").rglob("*") if path.is_file()}


def test_type_checkers_find_the_annotations(checkout):
    """`py.typed` is in what is installed."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "out"], cwd=checkout,
        env={**os.environ, "MAGI_ATTENTION_SKIP_CUDA_BUILD": "1"}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0 and (checkout / "out" / "magi_attention" / "py.typed").is_file(), done.stderr


def test_a_missing_compiler_is_a_notice(checkout):
    done = install(checkout, CUDA_HOME=str(checkout / "no-cuda"))
    assert done.returncode == 0 and list(checkout.glob("dist/*.whl")), done.stderr
    for name, reason in (("ffa", "correct or unset CUDA_HOME"), ("planner", "no-such-compiler")):
        start = f"magi_attention: {name} library was not built"
        (notice,) = (line for line in done.stderr.splitlines() if line.startswith(start))
        assert reason in notice
    assert "Traceback" not in done.stderr


def test_a_host_library_that_does_not_compile_fails_the_install(checkout):
    compiler = checkout.parent / "c++"
    compiler.write_text("#!/bin/sh\necho 'this one too'\nexit 1\n")
    compiler.chmod(0o755)
    done = install(checkout, CXX=str(compiler), MAGI_ATTENTION_PREBUILD_FFA="0")
    assert done.returncode != 0 and "this one too" in done.stderr and not list(checkout.glob("dist/*.whl"))
    assert "error: the planner library does not compile" in done.stderr and f"than {compiler} in CXX" in done.stderr
