# SPDX-License-Identifier: Apache-2.0
"""All checks, with the level from which on each is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from magi_attention.tools.doctor import gpu_checks, group_checks, host_checks, library_checks
from magi_attention.tools.doctor.finding import ERROR, Finding
from magi_attention.tools.doctor.system import Gpu, System

# static: no GPU and no other process is asked, as while an image is built. quick: below two seconds, nothing is
# allocated on a GPU. full: also what takes longer or uses the GPUs.
STATIC, QUICK, FULL = LEVELS = ("static", "quick", "full")


@dataclass(frozen=True)
class Check:
    id: str
    title: str
    level: str
    look: Callable[[System], Finding]


CHECKS = (
    Check(
        "torch", "torch is there, new enough, and built for GPUs where there are some", STATIC, gpu_checks.check_torch
    ),
    Check("pkg", "what is installed under the name of this package", STATIC, library_checks.check_package),
    Check("abi", "libraries of this package load and fit", STATIC, library_checks.check_abi),
    Check("pins", "NCCL and NVSHMEM have the versions that torch wants", STATIC, library_checks.check_pins),
    Check("nvs", "NVSHMEM's halves", STATIC, library_checks.check_nvshmem),
    Check("env", "environment variables", STATIC, host_checks.check_environment),
    Check("drv", "driver against the CUDA of torch", QUICK, gpu_checks.check_driver),
    Check("gpu", "GPUs against installed kernels, MIG, memory errors", QUICK, gpu_checks.check_gpus),
    Check("clk", "clocks", QUICK, gpu_checks.check_clocks),
    Check("shm", "shared memory", QUICK, host_checks.check_shared_memory),
    Check("lock", "limit of pinned memory", QUICK, host_checks.check_memlock),
    Check("ib", "InfiniBand and RoCE", QUICK, host_checks.check_infiniband),
    Check("cap", "capabilities", QUICK, host_checks.check_capabilities),
    Check("gdr", "network cards reading GPU memory", QUICK, host_checks.check_gpudirect),
    Check("net", "name and interfaces", QUICK, host_checks.check_network),
    Check("lib", "libraries that a process really loads", FULL, library_checks.check_loaded),
    Check("p2p", "peer access and NVSwitch", FULL, gpu_checks.check_peers),
    Check("nccl", "bandwidth of an all-reduce", FULL, group_checks.check_bandwidth),
)


class NoGpus(System):
    """This machine without a look at its GPUs."""

    gpus: list[Gpu] = []  # type: ignore[assignment]

    def has_nvidia_device(self) -> bool:
        return False


def checks_of(level: str) -> list[Check]:
    return [check for check in CHECKS if LEVELS.index(check.level) <= LEVELS.index(level)]


def examine(system: System, level: str) -> list[Finding]:
    """One finding per check of the level. A check that fails itself is an error, because nothing was seen."""
    findings = []
    for check in checks_of(level):
        try:
            findings.append(check.look(system))
        except Exception as error:  # why any: one odd machine must not hide what the other checks see
            evidence = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(check.id, ERROR, evidence, "report it with what `magi collect-env` prints"))
    return findings
