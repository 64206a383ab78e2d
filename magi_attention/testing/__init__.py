# SPDX-License-Identifier: Apache-2.0
"""Tools for tests: masks, tolerances, processes. Names resolve on first use."""

from __future__ import annotations

import importlib

_HOME = {
    "mask_families": "masks",
    "random_slices": "masks",
    "run_processes": "spawn",
}
_MODULES = {*_HOME.values(), "precision"}

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
