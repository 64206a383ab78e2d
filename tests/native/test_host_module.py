# SPDX-License-Identifier: Apache-2.0
"""The Python module of prepared launches: its build, its loader, what it exports, and what it refuses."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.kernels.ffa.launch_cache import TorchHooks
from magi_attention.native import abi, build, loader, toolchain
from magi_attention.native.intact import sealed
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built() -> build.Built:
    try:
        (made,) = build.build_all("host")
    except BuildError as error:
        pytest.skip(f"The host module cannot be built here: {error}")
    loader._load_host.cache_clear()
    return made


def test_the_module_is_small_and_hides_its_symbols(built):
    assert built.path.name == "_magi_host" + sysconfig.get_config_var("EXT_SUFFIX")
    module = loader.load_host()
    assert (module.abi_version, module.host_version) == (abi.ABI_VERSION, abi.HOST_VERSION)
    if sys.platform == "linux":
        assert built.path.stat().st_size < 300_000
    if shutil.which("nm"):
        listed = subprocess.run(["nm", "-D", "--defined-only", str(built.path)], capture_output=True, text=True)
        exported = sorted(line.split()[-1] for line in listed.stdout.splitlines())
        assert exported == ["PyInit__magi_host", "magi_build_info"]
    if shutil.which("ldd"):
        needed = subprocess.run(["ldd", str(built.path)], capture_output=True, text=True).stdout
        assert "torch" not in needed and "libpython" not in needed


def test_no_header_of_torch_is_included():
    for source in (ROOT / "csrc" / "python").iterdir():
        lines = [line for line in source.read_text().splitlines() if line.startswith("#include")]
        assert not any("torch/" in line or "ATen" in line or "c10" in line for line in lines), source


def test_loader_errors_say_what_to_do(built, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match="not built.*native.build --only host"):
        loader.load_host(tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / built.path.name).write_bytes(sealed(b"\x7fELF but of no machine"))
    with pytest.raises(UnsupportedError, match="cannot be loaded.*--only host"):
        loader.load_host(broken)
    for name in ("ABI_VERSION", "HOST_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(abi, name, 99)
            loader._load_host.cache_clear()
            with pytest.raises(UnsupportedError, match="needs .*99.*replace"):
                loader.load_host()
    loader._load_host.cache_clear()


def test_missing_tools_are_sentences(monkeypatch, tmp_path):
    real = toolchain.importlib.util.find_spec
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None if name == "pybind11" else real(name))
    assert (toolchain.require_pybind11() / "pybind11" / "pybind11.h").is_file(), "torch brings a copy"
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install pybind11"):
        build.build_all("host", lib=tmp_path, folder=tmp_path / "build")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"Python.h.*apt-get install python3\.\d+-dev"):
        build.build_all("host", lib=tmp_path, folder=tmp_path / "build")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="set CXX"):
        build.build_all("host", lib=tmp_path, folder=tmp_path / "build")


def make(**changes):
    def example(q, k, v, q_ranges=None, k_ranges=None, attn_type_map=None, *, sink=None, scale=1.0):
        pass

    parameters = inspect.signature(example).parameters.values()
    arguments = {
        "hooks": TorchHooks.find(), "signature": [(p.name, p.default) for p in parameters], "positional": 6,
        "ignored": (), "environment": {}, "watched": (), "result": AttnForwardMeta, "prepare": lambda **_: None,
    }  # fmt: skip
    return loader.load_host().KnownCalls(**{**arguments, **changes})


def test_what_cannot_be_understood_is_refused(built):
    hooks = TorchHooks.find()
    for changes, kind in (
        ({"signature": [("q", None)]}, ValueError),
        ({"signature": [(f"p{i}", None) for i in range(41)]}, ValueError),
        ({"ignored": ("no_such",)}, ValueError),
        ({"hooks": hooks._replace(exchange_api=None)}, (ValueError, TypeError)),
        ({"hooks": hooks._replace(exchange_api=torch._C._functions)}, (ValueError, TypeError)),
        ({"hooks": hooks._replace(tensor=list)}, AttributeError),
        ({"hooks": None}, AttributeError),
        ({"positional": "six"}, TypeError),
    ):
        with pytest.raises(kind):
            make(**changes)


def test_bare_functions_outlive_the_memo(built):
    q = torch.zeros(4, 2, 8)
    ranges = torch.zeros(1, 2, dtype=torch.int32)
    seen = []
    memo = make(prepare=lambda **arguments: seen.append(arguments))
    find, remember = memo.find, memo.remember
    del memo
    assert find(q, q, q, ranges, ranges) is None and find() is None
    assert remember(q, q, q, ranges, k_ranges=ranges) is None
    (arguments,) = seen
    assert list(arguments) == ["q", "k", "v", "q_ranges", "k_ranges", "attn_type_map", "sink", "scale"]
    assert arguments["k"] is q and arguments["attn_type_map"] is None and arguments["scale"] == 1.0
    assert remember(q, q, q, ranges, ranges, scale=[1]) is None and len(seen) == 1, "no plain value"
    assert remember(q[0, 0, 1:], q, q, ranges, ranges) is None and len(seen) == 1, "not aligned"
    with pytest.raises(AttributeError, match="prefix"):
        make(prepare=lambda **_: object()).remember(q, q, q, ranges, ranges)


def test_a_wheel_has_the_tag_of_its_python(built, tmp_path):
    environment = {**os.environ, "MAGI_ATTENTION_PREBUILD_FFA": "0", "CUDA_HOME": str(tmp_path)}
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    for path in (source / "csrc").glob("p*/**/*.cpp"):  # planner and python: whether they compile is tested elsewhere
        path.write_text(f'extern "C" int magi_{path.stem}() {{ return 0; }}\n')
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"-{tag}-{tag}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert f"magi_attention/lib/{built.path.name}" in names and "magi_attention/csrc/python/module.cpp" in names
