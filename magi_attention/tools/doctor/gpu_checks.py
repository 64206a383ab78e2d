# SPDX-License-Identifier: Apache-2.0
"""Checks of driver, GPUs, clocks and the links between GPUs."""

from __future__ import annotations

import re

from magi_attention.native import install
from magi_attention.native.families import capability_of, describe_capabilities, family_of, was_run
from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from magi_attention.tools.doctor.system import System

# CUDA major version -> the oldest driver branch that runs it
MINIMUM_DRIVER = {12: 525, 13: 580}
# Bits of nvidia-smi's throttle reasons that mean trouble; a power cap under load does not.
_SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


def no_gpu(system: System) -> str | None:
    """Why GPU checks are skipped, or None."""
    if system.gpus:
        return None
    if system.has_nvidia_device():
        return "nvidia-smi does not answer although there are /dev/nvidia* devices; see drv"
    return "no NVIDIA GPU in sight"


def check_driver(system: System) -> Finding:
    gpus, cuda = system.gpus, system.torch_cuda()
    if not gpus:
        if system.has_nvidia_device():
            return Finding(
                "drv",
                ERROR,
                "/dev/nvidia* is there, but nvidia-smi fails: driver and its tools do not fit, or are not installed",
                "in a container: --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a host: reboot after a "
                "driver update",
            )
        return Finding("drv", SKIPPED, "no NVIDIA GPU in sight")
    driver = gpus[0].driver
    if cuda is None:
        return Finding("drv", SKIPPED, f"driver {driver}; torch has no CUDA version to compare with, see torch")
    major = int(cuda.split(".")[0])
    minimum = MINIMUM_DRIVER.get(major, max(MINIMUM_DRIVER.values()))
    evidence = f"driver {driver}, torch for CUDA {cuda}, which needs {minimum} or newer"
    if int(driver.split(".")[0]) < minimum:
        return Finding("drv", ERROR, evidence, f"update the driver to {minimum}, or install a torch for an older CUDA")
    return Finding("drv", OK, evidence)


def check_torch(system: System) -> Finding:
    version, cuda = system.version("torch"), system.torch_cuda()
    if version is None:
        return Finding("torch", ERROR, "torch is not installed", "pip install 'torch>=2.9'")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < (2, 9):
        return Finding("torch", ERROR, f"torch {version}, 2.9 or newer is needed", "pip install --upgrade torch")
    if system.gpus and cuda is None:
        return Finding(
            "torch",
            ERROR,
            f"torch {version} is a CPU build, but there are {len(system.gpus)} GPUs",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
        )
    return Finding("torch", OK, f"torch {version}, " + (f"for CUDA {cuda}" if cuda else "CPU build"))


def check_gpus(system: System) -> Finding:
    """Are there kernels for these GPUs, and is each whole and healthy?"""
    if reason := no_gpu(system):
        return Finding("gpu", SKIPPED, reason)
    gpus, native = system.gpus, system.native_libraries()
    names = ", ".join(sorted({f"{sum(g.name == o.name for o in gpus)} x {g.name} ({g.arch})" for g in gpus}))
    if broken := [g for g in gpus if g.ecc_errors]:
        listing = ", ".join(f"GPU {g.index}: {g.ecc_errors}" for g in broken)
        return Finding("gpu", ERROR, f"{names}; uncorrected memory errors: {listing}", "nvidia-smi --gpu-reset")
    for arch in sorted({g.arch for g in gpus}):
        family = family_of(capability_of(arch))
        if family is None:
            return Finding(
                "gpu",
                WARNING,
                f"{names}; this package has kernels for compute capabilities {describe_capabilities()}, not for {arch}",
                "MAGI_ATTENTION_KERNEL_BACKEND=sdpa_ol uses PyTorch's, which are slower",
            )
        if not native[family.library][0]:
            build = f"python -m magi_attention.native.build --arch {family.name}"
            remedy = f"{install.ours(f'{install.MAIN}[{family.name}]')}, or in a checkout {build}"
            evidence = f"{names}; the kernels for {arch} are not installed, PyTorch's are slower"
            return Finding("gpu", WARNING, evidence, remedy)
    if new := sorted({g.arch for g in gpus if not was_run(capability_of(g.arch))}):
        evidence = f"{names}; nobody has said yet how the kernels for {', '.join(new)} do"
        return Finding("gpu", OK, evidence, "magi test --suite gpu runs their tests and leaves a report to send")
    if mig := [g for g in gpus if g.is_mig]:
        listing = ", ".join(str(g.index) for g in mig)
        return Finding("gpu", WARNING, f"{names}; MIG is on for GPU {listing}", "nvidia-smi -mig 0 gives whole GPUs")
    if len({g.name for g in gpus}) > 1:
        remedy = "CUDA_VISIBLE_DEVICES with GPUs of one kind"
        return Finding("gpu", WARNING, f"{names}: of several kinds, so the slowest sets the pace", remedy)
    return Finding("gpu", OK, names)


def check_clocks(system: System) -> Finding:
    if reason := no_gpu(system):
        return Finding("clk", SKIPPED, reason)
    slow = []
    for gpu in system.gpus:
        reasons = [name for bit, name in _SLOWDOWNS.items() if gpu.throttle & bit]
        if reasons:
            slow.append(f"GPU {gpu.index}: {', '.join(reasons)}")
    if slow:
        return Finding(
            "clk",
            WARNING,
            f"clocks are held down ({'; '.join(slow)})",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    if not all(g.is_persistent for g in system.gpus):
        return Finding("clk", WARNING, "persistence mode is off, so the first use waits seconds", "nvidia-smi -pm 1")
    return Finding("clk", OK, "no slowdown, persistence mode is on")


def check_peers(system: System) -> Finding:
    """Can every GPU read every other one's memory?"""
    if reason := no_gpu(system):
        return Finding("p2p", SKIPPED, reason)
    if len(system.gpus) < 2:
        return Finding("p2p", SKIPPED, "one GPU has no peers")
    fabric = re.findall(r"Fabric\s+State\s*:\s*(.+)", system.run(["nvidia-smi", "-q"], 30) or "")
    if pending := [state.strip() for state in fabric if state.strip() not in ("Completed", "N/A")]:
        return Finding(
            "p2p", ERROR, f"NVSwitch fabric is {pending[0]!r}, not Completed", "systemctl restart nvidia-fabricmanager"
        )
    matrix = parse_peers(system.run(["nvidia-smi", "topo", "-p2p", "r"], 30) or "")
    if not matrix:
        remedy = "nvidia-smi topo -p2p r shows what it says"
        return Finding("p2p", WARNING, "nvidia-smi tells nothing about peer access", remedy)
    missing = [f"{a}-{b} {state}" for (a, b), state in sorted(matrix.items()) if state != "OK"]
    if missing:
        return Finding(
            "p2p",
            WARNING,
            f"no peer access for {len(missing)} of {len(matrix)} pairs ({', '.join(missing[:4])}), so rows go through "
            "host memory",
            "on the host switch off ACS (setpci) and the IOMMU (iommu=pt), or choose GPUs under one switch",
        )
    return Finding("p2p", OK, f"all {len(matrix)} pairs of {len(system.gpus)} GPUs")


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> OK, NS, ... of the matrix that `nvidia-smi topo -p2p r` prints."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"GPU\d+", words[0]) or re.fullmatch(r"GPU\d+", words[1]):
            continue
        row = int(words[0][3:])
        for column, state in enumerate(words[1:]):
            if state != "X":
                found[row, column] = state
    return found
