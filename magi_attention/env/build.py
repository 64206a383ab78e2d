# SPDX-License-Identifier: Apache-2.0
"""Getters of the variables for kernels compiled on the spot. Each reads the environment when called."""

from __future__ import annotations

from pathlib import Path

from magi_attention.env import registry


def is_no_build_cache() -> bool:
    return registry.get("MAGI_ATTENTION_NO_BUILD_CACHE")


def workspace_base_dir() -> str:
    """Folder in which ``.cache/magi_attention`` lies; the home folder if unset. Nothing is created."""
    return registry.get("MAGI_ATTENTION_WORKSPACE_BASE") or str(Path.home())


def fa4_cache_dir() -> str:
    """Folder for kernels of FlashAttention-4 that are compiled on this machine; empty if unset."""
    return registry.get("MAGI_ATTENTION_FFA_FA4_CACHE_DIR")


def is_force_jit_build() -> bool:
    return registry.get("MAGI_ATTENTION_FORCE_JIT_BUILD")


def is_portable_kernels() -> bool:
    """Do 9.0 GPUs run the portable kernels, too?"""
    return registry.get("MAGI_ATTENTION_PORTABLE_KERNELS")


def is_build_verbose() -> bool:
    return registry.get("MAGI_ATTENTION_BUILD_VERBOSE")


def is_build_debug() -> bool:
    return registry.get("MAGI_ATTENTION_BUILD_DEBUG")


def nvcc_threads(unset: int = 4) -> int:
    """Threads of one nvcc process, ``unset`` if the variable is not set."""
    return registry.get("NVCC_THREADS") if registry.is_set("NVCC_THREADS") else unset


def max_jobs() -> int | None:
    """Compilations at a time: that of the ahead build, else MAX_JOBS, else None."""
    return registry.get("MAGI_ATTENTION_PREBUILD_FFA_JOBS") or registry.get("MAX_JOBS")


def is_prebuild_ffa() -> bool:
    """Are the attention kernels compiled when the package is installed? On if unset."""
    return registry.get("MAGI_ATTENTION_PREBUILD_FFA")


def build_compute_capability() -> str:
    """Compute capabilities that kernels are built for, such as "80,90"; empty if unset."""
    return registry.get("MAGI_ATTENTION_BUILD_COMPUTE_CAPABILITY")


def is_skip_cuda_build() -> bool:
    return registry.get("MAGI_ATTENTION_SKIP_CUDA_BUILD")


def build_revision() -> str:
    """Git revision for the records of built libraries; empty if not told, as in development."""
    return registry.get("MAGI_ATTENTION_BUILD_REVISION")


def cuda_home() -> str:
    """The CUDA toolkit asked for, empty if unset."""
    return registry.get("CUDA_HOME")


def cxx() -> str:
    return registry.get("CXX")
