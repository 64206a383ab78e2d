# SPDX-License-Identifier: Apache-2.0
"""Compilers, sources and flags of the native libraries. Finds things, starts nothing, creates nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from magi_attention.env import build as env
from magi_attention.errors import BuildError
from magi_attention.native import families

PACKAGE = Path(__file__).resolve().parent.parent
LIB = PACKAGE / "lib"
PLANNER, HOST, COMM, GIN = "planner", "host", "comm", "gin"
FFA_SM90 = families.SM90.library
HOST_MODULE = "_magi_host"
_LEAST_NCCL = (2, 30)  # csrc/comm/networks/gin/gin.cu does not compile with 2.28, and 2.29 was not tried
_BYTES_PER_JOB = 5 * 2**29  # 2.5 GiB: cicc and ptxas on the largest variant, with room


def library_file(name: str) -> str:
    """File name of library ``name``: ``libmagi_planner.so``; of the host module, with the tag of this Python."""
    return HOST_MODULE + sysconfig.get_config_var("EXT_SUFFIX") if name == HOST else f"libmagi_{name}.so"


def built_libraries() -> list[Path]:
    """What is built and can be used by this Python."""
    return [*sorted(LIB.glob(library_file("*"))), *LIB.glob(library_file(HOST))]


def nvcc_flags(arch: str) -> list[str]:
    """Flags of every CUDA object; part of what identifies a compiled variant."""
    flags = ["-O3", "-std=c++17", families.BY_NAME[arch].gencode, "-Xcompiler", "-fPIC,-fvisibility=hidden", "-DNDEBUG"]
    flags += ["--expt-relaxed-constexpr", "-cudart", "static", "-Xptxas", "-v,-warn-spills"]
    return flags + (["-lineinfo"] if env.is_build_debug() else [])


def cxx_flags() -> list[str]:
    """Flags of every host object. Ranks plan alike whatever plans for them, so products are rounded before they are
    added."""
    flags = ["-O3", "-ffp-contract=off", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall", "-Wextra"]
    return flags + (["-g"] if env.is_build_debug() else [])


def strip_flags() -> list[str]:
    """Linker flags that leave out names which nobody looks up, and with them those of temporary files."""
    return [] if env.is_build_debug() or sys.platform == "darwin" else ["-s"]


def target_of(arch: str) -> str:
    """What the code of ``arch`` is compiled for: "sm_90a" for "sm90"."""
    return families.BY_NAME[arch].target


def plain_target(arch: str) -> str:
    """The target of code that uses no feature of one GPU family alone: "sm_90" for "sm90"."""
    return target_of(arch).rstrip("af")


def find_nvshmem() -> Path | None:
    """The folder of NVSHMEM with include and lib, out of its package."""
    return _nvidia_package("nvshmem")


def _nvidia_package(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(f"nvidia.{name}")
    except (ImportError, ValueError):
        spec = None
    places = map(Path, (spec.submodule_search_locations or ()) if spec else ())
    return next((p for p in places if (p / "lib").is_dir()), None)


def require_nvshmem() -> Path:
    """``find_nvshmem`` with its headers, or a sentence that says how to get it."""
    found = find_nvshmem()
    if found and (found / "include" / "nvshmem.h").is_file():
        return found
    raise BuildError(
        "Transfers over NVSHMEM need its headers, and there are none: run `pip install nvidia-nvshmem-cu13`, or the "
        "package of your CUDA version."
    )


def require_nccl() -> Path:
    """The folder of NCCL with its headers, those of the device API among them, out of its package."""
    found, least = _nvidia_package("nccl"), ".".join(map(str, _LEAST_NCCL))
    version = None if found is None else _nccl_version(found / "include" / "nccl.h")
    remedy = f"run `pip install 'nvidia-nccl-cu13>={least}'`, or the package of your CUDA version"
    if version is not None and version < _LEAST_NCCL:
        raise BuildError(
            f"Transfers over NCCL's device API need NCCL {least} or newer, and {found} has "
            f"{'.'.join(map(str, version))}: {remedy}. torch has to load that one, too: use a torch that is built with "
            "it, or MAGI_ATTENTION_NODE_TRANSPORT=nvshmem, which needs no such version."
        )
    if found and version is not None and (found / "include" / "nccl_device.h").is_file():
        return found
    raise BuildError(
        f"Transfers over NCCL's device API need its headers, and there are none: {remedy}, of the version that torch "
        "uses."
    )


def _nccl_version(header: Path) -> tuple[int, ...] | None:
    """The version that a header nccl.h tells; None if there is none."""
    text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
    found = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return tuple(int(part[1]) for part in found if part) if all(found) else None


def find_csrc() -> Path:
    """The folder of the native sources: beside the package in a checkout, inside it when installed.

    Raises:
        BuildError: there is none.
    """
    for folder in (PACKAGE.parent / "csrc", PACKAGE / "csrc"):
        if (folder / "include" / "magi" / "abi.h").is_file():
            return folder
    raise BuildError(
        f"The native sources are neither in {PACKAGE.parent / 'csrc'} nor in {PACKAGE / 'csrc'}; "
        "build from a checkout of the repository."
    )


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, else on PATH, else of the nvidia packages of pip, else under /usr/local/cuda."""
    home = env.cuda_home()
    if home:
        path = Path(home) / "bin" / "nvcc"
        return path if path.is_file() else None
    if found := shutil.which("nvcc"):
        return Path(found)
    return next((p for p in [*_pip_nvcc(), Path("/usr/local/cuda/bin/nvcc")] if p.is_file()), None)


def _pip_nvcc() -> Iterable[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)


def require_nvcc() -> Path:
    """``find_nvcc`` or a sentence that says how to get one."""
    if nvcc := find_nvcc():
        return nvcc
    if home := env.cuda_home():
        raise BuildError(f"CUDA_HOME is {home}, but {home}/bin/nvcc is no file; correct or unset CUDA_HOME.")
    raise BuildError(
        "The CUDA kernels need nvcc, and there is none: install a CUDA toolkit (12.8 or newer), or "
        "`pip install nvidia-cuda-nvcc`, or set CUDA_HOME to the toolkit."
    )


def find_ninja() -> Path | None:
    """ninja on PATH, else beside this interpreter, else of the pip package."""
    if found := shutil.which("ninja"):
        return Path(found)
    places = [Path(sys.executable).parent / "ninja"]
    if spec := importlib.util.find_spec("ninja"):
        places += [Path(folder) / "data" / "bin" / "ninja" for folder in spec.submodule_search_locations or ()]
    return next((p for p in places if p.is_file()), None)


def require_ninja() -> Path:
    """``find_ninja`` or a sentence that says how to get one."""
    if ninja := find_ninja():
        return ninja
    raise BuildError("Native builds need ninja, and there is none: run `pip install ninja`.")


def require_cxx() -> str:
    """The C++ compiler of the host libraries, or a sentence."""
    if found := shutil.which(env.cxx()):
        return found
    raise BuildError(
        f"The host libraries need a C++17 compiler, and {env.cxx()!r} is none; install g++ or clang, or set CXX."
    )


def find_pybind11() -> Path | None:
    """The headers of pybind11: of its package, else those that come with torch."""
    for package, folder in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(place) / folder / "pybind11" / "pybind11.h").is_file():
                return Path(place) / folder
    return None


def require_pybind11() -> Path:
    """``find_pybind11`` or a sentence that says how to get it."""
    if found := find_pybind11():
        return found
    raise BuildError("The host module needs the headers of pybind11, and there are none: run `pip install pybind11`.")


def require_python_headers() -> Path:
    """The folder of ``Python.h`` of this Python, or a sentence that says how to get it."""
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").is_file():
        return folder
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise BuildError(
        f"The host module needs Python.h, and it is not in {folder}; on Debian and Ubuntu run "
        f"`apt-get install python{version}-dev`."
    )


def num_jobs() -> int:
    """Compilations at a time: as asked for by the environment, else by cores and available memory."""
    if asked := env.max_jobs():
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in fields:
            cores = min(cores, int(fields["MemAvailable"].split()[0]) * 1024 // _BYTES_PER_JOB)
    return max(1, cores)


def load_manifest(csrc: Path) -> ModuleType:
    """The module ``csrc/ffa/variants.py``, which is no part of a package."""
    path = csrc / "ffa" / "variants.py"
    return _load_module(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _load_module(path: Path, _stamp: int) -> ModuleType:
    name = f"magi_ffa_variants_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


def source_files(csrc: Path) -> list[Path]:
    """Every file that a compiled library depends on, without generated ones."""
    kinds = {".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".py", ".inc"}
    files = (p for p in sorted(csrc.rglob("*")) if p.suffix in kinds)
    return [p for p in files if "inst" not in p.parts and "__pycache__" not in p.parts]


def source_hash(csrc: Path, extra: Iterable[str] = ()) -> str:
    """16 hex digits over paths and bytes of the sources and over ``extra`` words, such as flags."""
    digest = hashlib.sha256()
    for path in source_files(csrc):
        digest.update(f"{path.relative_to(csrc).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    for word in extra:
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:16]
