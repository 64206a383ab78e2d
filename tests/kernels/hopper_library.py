# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper compiled for the CPU, see hopper_on_cpu/README.md."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

STAND_INS = Path(__file__).with_name("hopper_on_cpu")
FLAGS = ("-O2", "-fno-strict-aliasing", "-fno-extern-tls-init", "-Wno-unknown-pragmas", "-Wno-psabi")


def hopper_library(folder: Path, source: Path) -> ctypes.CDLL:
    """``source`` with the kernels of ``csrc`` that it includes; skips the test where there is no g++ or no csrc."""
    csrc = csrc_or_skip()
    return compiled_or_skip(folder, [source], [STAND_INS, csrc, csrc / "include"], *FLAGS)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy at a multiple of 128 bytes."""
    raw = torch.zeros(x.numel() + 128, dtype=x.dtype)
    skip = (-raw.data_ptr() % 128) // x.element_size()
    return raw[skip : skip + x.numel()].view(x.shape).copy_(x)


def at(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())
