# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled at first use: which tile, the cache, its lock, processes that are killed, and what is said."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_tree import KERNEL_SOURCE, ROOT, need

from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.native import abi, build, jit, loader, toolchain
from magi_attention.native.intact import sealed
from magi_attention.testing.waiting import DEADLINE_S, wait_until

COMPILE = (
    "import logging, sys; from pathlib import Path; from magi_attention.native import jit; "
    "logging.basicConfig(format='%(levelname)s %(message)s'); t = Path(sys.argv[1]); "
    "print(jit.compile_variant(jit.variant_for('bf16', 64, 64, t), t))"
)


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    """Where the cache lies; no variable of the user counts."""
    for name in ("NO_BUILD_CACHE", "FORCE_JIT_BUILD", "BUILD_DEBUG", "BUILD_VERBOSE"):
        monkeypatch.delenv(f"MAGI_ATTENTION_{name}", raising=False)
    monkeypatch.delenv("NVCC_THREADS", raising=False)
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path / "base"))
    jit._load_variant.cache_clear()
    yield tmp_path / "base"
    jit._load_variant.cache_clear()


def fake_nvcc(folder: Path, script: str) -> Path:
    """A toolkit whose nvcc is a shell script; for CUDA_HOME."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return folder


def start(tree: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, str(tree)], env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_the_smallest_tile_that_there_is():
    csrc = ROOT / "csrc"
    for dims, tile in (
        ((72, 40), (128, 64)), ((64, 64), (64, 64)), ((192, 64), (192, 64)), ((200, 72), (256, 128)),
        ((64, 128), (128, 128)), ((8, 256), (256, 256)), ((256, 192), (256, 256)), ((136, 136), (192, 192)),
        ((96, 88), (96, 96)), ((80, 80), (96, 96)),
    ):  # fmt: skip
        assert jit.variant_for("bf16", *dims, csrc).stem == f"fwd_bf16_d{tile[0]}_dv{tile[1]}", dims
    for dims, tile in (
        ((72, 40), (96, 96)), ((8, 64), (64, 64)), ((192, 128), (192, 128)), ((128, 136), (192, 192)),
        ((200, 8), (256, 256)),
    ):  # fmt: skip
        assert jit.variant_for("fp16", *dims, csrc, kind="bwd").stem == f"bwd_fp16_d{tile[0]}_dv{tile[1]}"
    assert jit.variant_for("fp16", 96, 96, csrc, kind="bwd", arch="portable_sm90").stem == "bwd_fp16_d128_dv128"
    assert jit.variant_for("bf16", 96, 96, csrc, arch="portable_sm90").stem == "fwd_bf16_d128_dv128"
    for dims in ((264, 64), (64, 264), (0, 64)):
        with pytest.raises(BuildError, match="up to 256"):
            jit.variant_for("bf16", *dims, csrc)


def test_jit_caches_by_source(tree, base, monkeypatch, caplog):
    need(toolchain.require_nvcc, toolchain.require_ninja)
    variant = jit.variant_for("fp16", 72, 40, tree)
    folder = jit.cache_folder(tree)
    assert folder.parent == base / ".cache" / "magi_attention" and not base.exists()
    assert folder.name.startswith(f"{abi.ABI_VERSION}-")
    assert jit.why_not("fp16", 72, 40, csrc=tree) is None and not base.exists()
    with caplog.at_level(logging.WARNING, logger="magi_attention.native"):
        lib = jit.compile_variant(variant, tree)
    (record,) = caplog.records
    assert variant.stem in record.getMessage() and str(folder / variant.stem) in record.getMessage()
    library = lib / "libmagi_ffa_sm90.so"
    loaded = loader.load("ffa_sm90", lib)
    assert loaded.magi_ffa_fwd(bytes(ctypes.sizeof(abi.FfaFwdParams))) == abi.OK
    assert loaded.magi_ffa_has_variant(abi.FWD, abi.FP16, 72, 40) == 1
    assert loaded.magi_ffa_has_variant(abi.BWD, abi.FP16, 72, 40) == 0
    assert not (tree / "ffa" / "sm90" / "inst").exists()  # the checkout is left alone
    stamp = library.stat().st_mtime_ns
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert jit.compile_variant(variant, tree) == lib and library.stat().st_mtime_ns == stamp
    assert jit.why_not("fp16", 72, 40, csrc=tree) is None and len(caplog.records) == 1
    monkeypatch.setenv("MAGI_ATTENTION_FORCE_JIT_BUILD", "1")
    assert "need nvcc" in jit.why_not("fp16", 72, 40, csrc=tree)
    monkeypatch.delenv("MAGI_ATTENTION_FORCE_JIT_BUILD")
    (tree / "ffa" / "sm90" / "main.cu").write_text(KERNEL_SOURCE.replace("SCALE", "3.f"))
    assert jit.cache_folder(tree) != folder and "need nvcc" in jit.why_not("fp16", 72, 40, csrc=tree)
    with pytest.raises(BuildError, match="nvcc"):
        jit.compile_variant(variant, tree)


def test_processes_that_want_one_kernel_compile_it_once(tree):
    need(toolchain.require_nvcc, toolchain.require_ninja)
    running = [start(tree) for _ in range(3)]
    results = [process.communicate(timeout=DEADLINE_S) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert sum(errors.count("WARNING Compiling") for _, errors in results) == 1, results
    assert len({out for out, _ in results}) == 1
    assert loader.load("ffa_sm90", Path(results[0][0].strip())).magi_abi_version() == abi.ABI_VERSION


@pytest.fixture
def sleepers(tmp_path):
    """A file to which processes that sleep write their numbers. Ninja gives each a group of its own, so that the end of
    the caller's group leaves them; here they end with the test."""
    file = tmp_path / "sleepers"
    file.touch()
    yield file
    for number in file.read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def test_a_killed_compilation_leaves_no_library(tree, base, tmp_path, sleepers):
    need(toolchain.require_ninja)
    # Half of each output is there when the process dies.
    writes = 'for last; do if [ "$before" = -o ]; then echo half > "$last"; touch "$0.began"; fi; before=$last; done'
    home = fake_nvcc(tmp_path / "cuda", f"{writes}\necho $$ >> {sleepers}\nexec sleep 3600")
    process = start(tree, CUDA_HOME=str(home))
    began = home / "bin" / "nvcc.began"
    wait_until(lambda: began.exists() or process.poll() is not None, "the compiler has begun")
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for name in ("libmagi_ffa_sm90.so", "main.o", "fwd_bf16_d64_dv64.o"):
        assert not list(base.rglob(name)), name
    need(toolchain.require_nvcc)
    done = start(tree)
    out, errors = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0 and "WARNING Compiling" in errors, errors
    assert loader.load("ffa_sm90", Path(out.strip())).magi_ffa_has_variant(abi.FWD, abi.BF16, 64, 64) == 1


def test_what_is_missing_is_a_sentence(tree, tmp_path, monkeypatch):
    ask = lambda: jit.why_not("bf16", 64, 64, csrc=tree)  # noqa: E731
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "correct or unset CUDA_HOME" in ask()
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda", "echo 'no such architecture'; exit 1")))
    with monkeypatch.context() as m:
        m.setattr(toolchain, "find_ninja", lambda: None)
        assert "pip install ninja" in ask()
    with monkeypatch.context() as m:
        file = tmp_path / "file"
        file.write_text("")
        m.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(file))
        assert f"{file} is no folder that can be written; set MAGI_ATTENTION_WORKSPACE_BASE" in ask()
        with pytest.raises(BuildError, match="set MAGI_ATTENTION_WORKSPACE_BASE"):
            jit.compile_variant(jit.variant_for("bf16", 64, 64, tree), tree)
    with monkeypatch.context() as m:
        m.setattr(toolchain, "PACKAGE", tmp_path / "elsewhere" / "magi_attention")
        assert "native sources are neither in" in jit.why_not("bf16", 64, 64)
    assert "up to 256" in jit.why_not("bf16", 512, 64, csrc=tree)
    need(toolchain.require_ninja)
    assert ask() is None  # a compiler is there, and that it fails shows when it is asked
    with pytest.raises(BuildError, match="(?s)Compilation failed.*no such architecture"):
        jit.compile_variant(jit.variant_for("bf16", 64, 64, tree), tree)


@pytest.mark.parametrize("data", [b"", b"no library", sealed(b"\x7fELF")[:-1]])
def test_a_library_of_the_cache_that_was_cut_off_is_compiled_again(tree, monkeypatch, data):
    variant = jit.variant_for("bf16", 64, 64, tree)
    library = jit.cache_folder(tree) / variant.stem / "lib" / "libmagi_ffa_sm90.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(data)

    class Compiled(Exception):
        pass

    def compile_again(*_args, **_options):
        raise Compiled

    monkeypatch.setattr(build, "build", compile_again)
    monkeypatch.setattr(toolchain, "require_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(build, "ffa_job", lambda *_args, **_options: None)
    with pytest.raises(Compiled):
        jit.compile_variant(variant, tree)
    library.write_bytes(sealed(b"\x7fELF"))
    assert jit.compile_variant(variant, tree) == library.parent


def test_a_damaged_library_of_the_cache_says_where_it_lies(tree, monkeypatch):
    monkeypatch.setattr(toolchain, "find_csrc", lambda: tree)
    folder = jit.cache_folder(tree) / "fwd_bf16_d64_dv64" / "lib"
    folder.mkdir(parents=True)
    (folder / "libmagi_ffa_sm90.so").write_bytes(sealed(b"\x7fELF but of no machine"))
    with pytest.raises(UnsupportedError, match=f"cannot be loaded.*delete {folder} to have that done again"):
        jit.load_variant("bf16", 64, 64)


def test_without_a_build_cache_edited_sources_count_at_once(tree, monkeypatch):
    need(toolchain.require_nvcc, toolchain.require_ninja)
    monkeypatch.setattr(toolchain, "find_csrc", lambda: tree)
    tile = [ctypes.c_int32() for _ in range(3)]

    def tokens() -> int:
        jit.load_variant("bf16", 64, 64).magi_ffa_fwd_tile(abi.BF16, 1, 1, 64, 64, *map(ctypes.byref, tile))
        return tile[0].value

    assert tokens() == 2 and jit.load_variant("bf16", 64, 64) is jit.load_variant("bf16", 64, 64)
    source = tree / "ffa" / "sm90" / "main.cu"
    source.write_text(source.read_text().replace("*t = *g = *p = 2;", "*t = *g = *p = 4;"))
    assert tokens() == 2, "kept by the process"
    monkeypatch.setenv("MAGI_ATTENTION_NO_BUILD_CACHE", "1")
    assert tokens() == 4
    assert jit.load_variant("bf16", 64, 64) is not jit.load_variant("bf16", 64, 64)
    monkeypatch.delenv("MAGI_ATTENTION_NO_BUILD_CACHE")
    assert tokens() == 2, "nothing was kept meanwhile"


def test_threads_of_nvcc(tree, tmp_path, monkeypatch):
    need(toolchain.require_ninja)
    log = tmp_path / "arguments"
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda", f'echo "$@" >> {log}; exit 1')))

    def asked_for(compile_it) -> set[str]:
        log.unlink(missing_ok=True)
        with pytest.raises(BuildError, match="Compilation failed"):
            compile_it()
        return {word for word in log.read_text().split() if word.startswith("--threads")}

    at_first_use = lambda: jit.compile_variant(jit.variant_for("bf16", 64, 64, tree), tree)  # noqa: E731
    ahead = lambda: build.build_all("ffa", lib=tmp_path / "lib", csrc=tree)  # noqa: E731
    folder = jit.cache_folder(tree)
    assert asked_for(at_first_use) == {"--threads=4"} and asked_for(ahead) == {"--threads=2"}
    monkeypatch.setenv("NVCC_THREADS", "3")
    assert asked_for(at_first_use) == {"--threads=3"} and asked_for(ahead) == {"--threads=3"}
    assert jit.cache_folder(tree) == folder, "the result is the same, so is its place"
