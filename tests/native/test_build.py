# SPDX-License-Identifier: Apache-2.0
"""The build on small source trees: increments, atomicity, locks, the guard, errors; the loader."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_tree import HOST_SOURCE, ROOT, need

from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.native import abi, build, loader, toolchain
from magi_attention.native.compile import report as compile_report
from magi_attention.native.intact import sealed
from magi_attention.testing.waiting import DEADLINE_S

SPILLING_KERNEL = """
__global__ void __launch_bounds__(1024, 2) greedy(float* x) {
  float a[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[i * 1024 + threadIdx.x];
  #pragma unroll
  for (int j = 0; j < 96; ++j) {
    float s = 0;
    #pragma unroll
    for (int i = 0; i < 96; ++i) s += a[i] * a[(i * 7 + j) % 96];
    x[j * 1024 + threadIdx.x] = s;
    __syncthreads();
  }
}
"""


def build_planner(tree: Path, **kwargs) -> build.Built:
    need(toolchain.require_cxx, toolchain.require_ninja)
    return build.build_all("planner", lib=tree.parent / "lib", csrc=tree, **kwargs)[0]


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith(".part") or ".part." in p.name]


def test_host_library_is_built_loaded_and_rebuilt_only_when_needed(tree):
    built = build_planner(tree)
    library = loader.load("planner", built.path.parent)
    assert library.magi_tile_plan_words(1, 1, 1) == 3 and not hasattr(library, "not_exported")
    with pytest.raises(Exception, match="Planning: too small"):
        loader.check(library, abi.CAPACITY, "Planning")
    inode, objects = built.path.stat().st_ino, tree.parent / "build" / "native" / "planner" / "plan.o"
    stamp = objects.stat().st_mtime_ns
    assert build_planner(tree).path.stat().st_ino == inode and objects.stat().st_mtime_ns == stamp
    header = tree / "include" / "magi" / "abi.h"
    header.write_text(header.read_text() + "\n#define LATER 1\n")
    build_planner(tree)
    assert objects.stat().st_mtime_ns != stamp  # the dependency on the header was noticed
    assert built.path.stat().st_ino == inode  # and the library, equal byte for byte, was left alone
    assert not leftovers(tree.parent)


def test_a_failing_compiler_leaves_the_old_library_and_shows_its_words(tree):
    built = build_planner(tree)
    before = built.path.read_bytes()
    source = tree / "planner" / "plan.cpp"
    good = source.read_text()
    source.write_text(good + "\nthis is no C++;\n")
    with pytest.raises(BuildError, match="no C\\+\\+|does not name a type|unknown type"):
        build_planner(tree)
    assert built.path.read_bytes() == before and not leftovers(tree.parent)
    source.write_text(good)
    build_planner(tree)


def test_two_builds_at_once(tree):
    need(toolchain.require_cxx, toolchain.require_ninja)
    code = (
        "import sys; from pathlib import Path; from magi_attention.native import build; t = Path(sys.argv[1]); "
        "build.build_all('planner', lib=t.parent / 'lib', csrc=t)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tree)], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [process.communicate(timeout=DEADLINE_S)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert loader.load("planner", tree.parent / "lib").magi_abi_version() == abi.ABI_VERSION


def test_the_lock_excludes(tmp_path):
    order = []

    def other() -> None:
        with build.locked(tmp_path):
            order.append("other")

    with build.locked(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("mine")
    thread.join(DEADLINE_S)
    assert order == ["mine", "other"]


def test_loader_errors_say_what_to_do(tree, tmp_path):
    with pytest.raises(UnsupportedError, match="not built.*native.build --only ffa"):
        loader.load("ffa_sm90", tmp_path)
    assert "native.build --only planner" in loader.why_absent("planner", tmp_path)
    (tmp_path / "libmagi_planner.so").write_bytes(sealed(b"\x7fELF but of no machine"))
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        loader.load("planner", tmp_path)
    source = tree / "planner" / "plan.cpp"
    source.write_text(HOST_SOURCE.replace("VERSION", "99"))
    built = build_planner(tree)
    with pytest.raises(UnsupportedError, match=f"ABI version 99.*needs {abi.ABI_VERSION}.*replace"):
        loader.load("planner", built.path.parent)
    text = HOST_SOURCE.replace("VERSION", str(abi.ABI_VERSION))
    source.write_text(text.replace("magi_tile_plan_check", "magi_other"))
    built = build.build_all("planner", lib=tree.parent / "lib2", csrc=tree)[0]
    with pytest.raises(UnsupportedError, match="no function magi_tile_plan_check"):
        loader.load("planner", built.path.parent)


def test_missing_tools_are_sentences(monkeypatch, tmp_path, tree):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="correct or unset CUDA_HOME"):
        toolchain.require_nvcc()
    with pytest.raises(BuildError, match="CUDA_HOME"):
        build.build_all("ffa", lib=tmp_path, csrc=tree)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(BuildError, match="install a CUDA toolkit"):
        toolchain.require_nvcc()
    monkeypatch.setattr(toolchain, "find_ninja", lambda: None)
    with pytest.raises(BuildError, match="pip install ninja"):
        toolchain.require_ninja()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler.*set CXX"):
        toolchain.require_cxx()
    with pytest.raises(BuildError, match="No variant is called 'fwd_x'"):
        build.build_all("ffa", variants=["fwd_x"], lib=tmp_path, csrc=tree)


def test_jobs(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.delenv("MAGI_ATTENTION_PREBUILD_FFA_JOBS", raising=False)
    assert 1 <= toolchain.num_jobs() <= (os.cpu_count() or 1)
    monkeypatch.setenv("MAX_JOBS", "5")
    assert toolchain.num_jobs() == 5
    monkeypatch.setenv("MAGI_ATTENTION_PREBUILD_FFA_JOBS", "7")
    assert toolchain.num_jobs() == 7


LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to X in 'k'
ptxas info    : Compiling entry function '_ZN4magi7ffa_fwdINS_9FwdConfigEEEvv' for 'sm_90a'
ptxas info    : Function properties for _ZN4magi7ffa_fwdINS_9FwdConfigEEEvv
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes stack frame, 1024 bytes smem
"""


def test_the_guard_reads_the_log():
    kernels, warnings = compile_report.parse_log(LOG)
    (kernel,) = kernels
    assert (kernel.registers, kernel.smem_bytes, kernel.stack_bytes, kernel.spill_bytes) == (168, 1024, 16, 20)
    assert len(warnings) == 1 and compile_report.short_name(kernel.entry) == "magi::ffa_fwd"
    unit = compile_report.Unit("fwd_x", 1.5, 2048, kernels, warnings)
    with pytest.raises(BuildError, match=r"(?s)fwd_x: 20 bytes of register spills.*C7510"):
        compile_report.check_units([unit])
    for code in ("C7508", "C7514", "C7519", "C7520", "C7602"):
        assert compile_report.parse_log(f"ptxas info : ({code}) slow")[1]
    for code in ("C7507", "C7521", "C1234"):
        assert not compile_report.parse_log(f"ptxas info : ({code}) fine")[1]
    table = compile_report.table([unit, compile_report.Unit("host", 0.1, 10)])
    assert "168" in table and "fwd_x" in table and "host" in table


def test_kernels_have_names_of_their_own():
    """nvcc puts the path of a file into the names of kernels without one, and wheels would differ by their folder."""
    nameless = re.compile(r"^\s*namespace\s*\{|\bstatic\s+__global__", re.MULTILINE)
    sources = [path for path in toolchain.source_files(ROOT / "csrc") if "__global__" in path.read_text()]
    assert len(sources) > 5
    assert not [path.name for path in sources if nameless.search(path.read_text())], "give the namespace a name"


def test_manifest():
    manifest = toolchain.load_manifest(ROOT / "csrc")
    stems = [v.stem for v in manifest.MANIFEST]
    assert len(set(stems)) == len(stems) == 44
    assert {v.kind for v in manifest.of_kernels(manifest.MANIFEST, "portable")} == {"fwd", "bwd"}
    v = manifest.Variant("fwd", "bf16", 192, 128)
    assert v in manifest.MANIFEST and v.stem == "fwd_bf16_d192_dv128"
    text = manifest.instance_source(v)
    assert '#include "ffa/sm90/fwd/launch.cuh"' in text
    assert "MAGI_FFA_INSTANCE(fwd, magi::bf16, 192, 128)" in text
    line = "MAGI_VARIANT(fwd, bf16, 192, 128)\n"
    assert manifest.dispatch_table(manifest.MANIFEST).count(line) == 1
    index = manifest.Variant("index_bwd", "fp16", 64, 64)
    assert index in manifest.MANIFEST and '#include "ffa/sm90/index/bwd/launch.cuh"' in manifest.instance_source(index)
    line = "MAGI_INDEX_VARIANT(index_bwd, fp16, 64, magi_ffa_index_bwd_fp16_d64_dv64)\n"
    assert manifest.index_table([index, v]).count("VARIANT") == 1 and line in manifest.index_table([index, v])
    assert index.stem not in manifest.dispatch_table(manifest.MANIFEST)
    backward = manifest.Variant("bwd", "fp16", 128, 128)
    assert backward in manifest.MANIFEST and '#include "ffa/sm90/bwd/launch.cuh"' in manifest.instance_source(backward)


def test_cuda_library_guard_and_report(tree, tmp_path):
    """One nvcc run through everything: instances, dispatch, link without libcuda, and the guard."""
    need(toolchain.require_nvcc, toolchain.require_ninja)
    lib = tmp_path / "lib"
    (built,) = build.build_all("ffa", variants=["fwd_bf16_d64_dv64"], lib=lib, csrc=tree)
    library = loader.load("ffa_sm90", lib)
    params = bytes(abi.FfaFwdParams())
    assert library.magi_ffa_fwd(params) == abi.UNSUPPORTED
    wanted = ctypes.c_int64()
    assert library.magi_ffa_fwd_workspace(params, ctypes.byref(wanted)) == abi.OK and wanted.value == 16
    # A library without kernels of the backward loads too, and says that it has none.
    assert library.magi_ffa_bwd(bytes(abi.FfaBwdParams())) == abi.INVALID_ARGUMENT
    data = json.loads(json.dumps(build.report([built])))["libraries"][0]
    units = {u["name"]: u for u in data["units"]}
    assert set(units) == {"main", "fwd_bf16_d64_dv64"} and units["main"]["kernels"][0]["registers"] > 0
    assert data["bytes"] == built.path.stat().st_size
    before = built.path.read_bytes()
    source = tree / "ffa" / "sm90" / "main.cu"
    source.write_text(source.read_text() + SPILLING_KERNEL)
    with pytest.raises(BuildError, match="main: [0-9]+ bytes of register spills in .*greedy"):
        build.build_all("ffa", variants=["fwd_bf16_d64_dv64"], lib=lib, csrc=tree)
    assert built.path.read_bytes() == before


def test_command_line(monkeypatch, capsys, tmp_path, tree):
    need(toolchain.require_cxx, toolchain.require_ninja)
    monkeypatch.setattr(toolchain, "find_csrc", lambda: tree)
    defaults = [tmp_path / "lib" if value == toolchain.LIB else value for value in build.build_all.__defaults__]
    monkeypatch.setattr(build.build_all, "__defaults__", tuple(defaults))
    report = tmp_path / "reports" / "build.json"
    assert build.main(["--only", "planner", "--report", str(report)]) == 0
    assert "libmagi_planner.so" in capsys.readouterr().out
    assert json.loads(report.read_text())["libraries"][0]["name"] == "planner"
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert build.main(["--only", "ffa"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: The CUDA kernels need nvcc") and "Traceback" not in error


@pytest.mark.parametrize(
    "asked, here, names",
    (
        ("", [], ["sm90"]),
        ("", ["8.6", "8.9", "9.0"], ["sm80", "sm90"]),
        ("", ["7.5"], ["sm90"]),
        ("90,100", ["8.0"], ["sm90", "sm100"]),
        ("12.0 8.0", [], ["sm120", "sm80"]),
    ),
)
def test_kernels_are_built_for_the_gpus_here_or_those_asked_for(monkeypatch, asked, here, names):
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY", asked)
    monkeypatch.setattr(build, "_capabilities_here", lambda: here)
    assert [family.name for family in build.chosen_families()] == names


@pytest.mark.parametrize("asked", ("75", "hopper", "90,"))
def test_a_gpu_without_kernels_is_refused_with_those_that_have_some(monkeypatch, asked):
    monkeypatch.setenv("MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY", asked)
    with pytest.raises(BuildError, match="there are no kernels for .*; give a comma list out of 8.0, 8.6.*12.1"):
        build.chosen_families()
