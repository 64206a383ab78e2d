# SPDX-License-Identifier: Apache-2.0
"""Checks of libraries: installed against loaded, pinned against installed, ours against this package."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from magi_attention.native import install
from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from magi_attention.tools.doctor.system import System
from magi_attention.version import __version__

_WATCHED = ("libcudart", "libnccl", "libnvshmem_host", "libcudnn")
_NODE_TRANSPORT = "MAGI_ATTENTION_NODE_TRANSPORT"
_PINNED = re.compile(r"^(nvidia-(?:nccl|nvshmem)-cu\d+)\s*\(?==\s*([\w.]+)")


def check_package(system: System) -> Finding:
    """What is installed under our name is this package, and not the empty one of the public index."""
    copies = system.copies(install.MAIN)
    for version, folder, is_empty in copies:
        if is_empty or version == install.PLACEHOLDER:
            evidence = f"{install.MAIN} {version} in {folder} is the empty package of the public index"
            remedy = f"pip uninstall --yes {install.MAIN}; {install.ours()}"
            return Finding("pkg", ERROR, f"{evidence}, imported in place of this one where it comes first", remedy)
    for version, folder, _ in copies:
        if version != __version__:
            evidence = f"{install.MAIN} {version} is installed in {folder}, and this is {__version__}"
            return Finding("pkg", WARNING, evidence, install.ours(again=True))
    return Finding("pkg", OK, f"{install.MAIN} {__version__}" + ("" if copies else ", not installed: a checkout"))


def check_abi(system: System) -> Finding:
    """Every library of ours that is there loads and is of this package's ABI; kernel wheels have its version."""
    native = system.native_libraries()
    broken = {name: why for name, (is_there, why) in native.items() if is_there and why}
    if broken:
        name, why = next(iter(broken.items()))
        return Finding("abi", ERROR, why, install.ours(again=True))
    wheels = system.packages("magi-attention-")
    if other := {name: version for name, version in wheels.items() if version != __version__}:
        name, version = next(iter(other.items()))
        remedy = install.ours(name)
        return Finding("abi", ERROR, f"{name} is {version}, magi_attention is {__version__}", remedy)
    there = [name for name, (is_there, _) in native.items() if is_there]
    absent = [name for name in native if name not in there]
    parts = ([f"{', '.join(there)} load"] if there else []) + ([f"{', '.join(absent)} not built"] if absent else [])
    return Finding("abi", OK, "; ".join(parts))


def check_pins(system: System) -> Finding:
    """The communication libraries beside torch are those that it was built for."""
    pins = [m for m in map(_PINNED.match, system.requirements("torch")) if m]
    if not pins:
        return Finding("pins", SKIPPED, "torch pins no NCCL or NVSHMEM (a CPU build, or one that brings its own)")
    seen = []
    for pin in pins:
        package, wanted = pin[1], pin[2]
        have = system.version(package)
        if have != wanted:
            what = f"{package} is {have}" if have else f"{package} is not installed"
            return Finding("pins", WARNING, f"{what}, torch wants {wanted}", f"pip install '{package}=={wanted}'")
        seen.append(f"{package} {have}")
    return Finding("pins", OK, ", ".join(seen))


def stem(path: str) -> str | None:
    """libnccl of .../libnccl.so.2, if it is one of those that are watched."""
    name = Path(path).name.partition(".so")[0].partition("-")[0]
    return name if name in _WATCHED else None


def check_loaded(system: System) -> Finding:
    """One copy of each library in a process, and that of torch's own packages."""
    loaded = system.loaded_libraries()
    if loaded is None:
        return Finding("lib", ERROR, "a process that imports torch fails", "python -c 'import torch' shows why")
    copies = defaultdict(set)
    for path in loaded:
        if name := stem(path):
            copies[name].add(path)
    if not copies:
        return Finding("lib", SKIPPED, "torch loads no CUDA library here")
    for name, paths in sorted(copies.items()):
        if len(paths) > 1:
            listing = " and ".join(sorted(paths))
            remedy = f"unset LD_LIBRARY_PATH LD_PRELOAD, or remove the copy that is not torch's ({sorted(paths)[0]})"
            return Finding("lib", ERROR, f"two copies of {name} in one process: {listing}", remedy)
    torch = system.package_folder("torch")
    home = str(torch.parent) if torch else ""
    foreign = sorted(p for paths in copies.values() for p in paths if home and not p.startswith(home))
    # A torch that was built with the system's libraries, as in NVIDIA's images, has none of its own to prefer.
    own = system.packages("nvidia-nccl") if foreign else {}
    if foreign and own:
        return Finding(
            "lib",
            WARNING,
            f"loaded from outside of torch's packages: {', '.join(foreign)} (installed: {_listing(own)})",
            "unset LD_LIBRARY_PATH LD_PRELOAD",
        )
    return Finding("lib", OK, ", ".join(sorted(Path(p).name for paths in copies.values() for p in paths)))


def _listing(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))


def _host_half(comm: dict[str, str]) -> str:
    """The package of NVSHMEM that goes with our collectives."""
    return f"nvidia-nvshmem-cu{next(iter(comm)).rpartition('-cu')[2]}"


def check_nvshmem(system: System) -> Finding:
    """The host half of NVSHMEM is for the CUDA of torch, and goes with the device half inside our library."""
    packages, comm = system.packages("nvidia-nvshmem-cu"), system.packages("magi-attention-comm")
    folder = system.package_folder("nvidia")
    files = system.names(f"{folder}/nvshmem/lib/libnvshmem_host.so.*") if folder else []
    paths = system.environ.get("LD_LIBRARY_PATH", "").split(":")
    strays = [f for path in paths if path for f in system.names(f"{path}/libnvshmem_host.so.*")]
    if strays and files and not set(strays) <= set(files):
        return Finding(
            "nvs",
            WARNING,
            f"LD_LIBRARY_PATH has {strays[0]}, pip has {files[0]}; a process that finds the first has halves of two "
            "versions",
            "unset LD_LIBRARY_PATH",
        )
    if not packages:
        if comm:
            remedy = f"pip install {_host_half(comm)}"
            return Finding("nvs", ERROR, f"{_listing(comm)} needs NVSHMEM's host library, which is missing", remedy)
        if system.environ.get(_NODE_TRANSPORT) == "nvshmem":
            remedy = f"pip install nvidia-nvshmem-cu13; {install.ours('magi_attention[nvshmem]')}"
            return Finding("nvs", ERROR, f"{_NODE_TRANSPORT}=nvshmem, and there is no NVSHMEM here", remedy)
        return Finding("nvs", SKIPPED, "no NVSHMEM here; rows cross between nodes by all-to-all-v")
    cuda = system.torch_cuda()
    lanes = {name.rpartition("-cu")[2] for name in packages}
    if cuda and cuda.split(".")[0] not in lanes:
        major = cuda.split(".")[0]
        remedy = f"pip install nvidia-nvshmem-cu{major}"
        return Finding("nvs", WARNING, f"{_listing(packages)}, but torch is for CUDA {cuda}", remedy)
    if not comm:
        rest = "magi-attention-comm is not installed, so rows cross between nodes by all-to-all-v"
        return Finding("nvs", OK, f"{_listing(packages)}; {rest}")
    halves, why = system.nvshmem_halves()
    if why:
        return Finding("nvs", ERROR, why, f"pip install --upgrade {_host_half(comm)}")
    return Finding("nvs", OK, f"{_listing(packages)}; {_listing(comm)} ({halves})")
