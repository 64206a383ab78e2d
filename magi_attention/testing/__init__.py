# SPDX-License-Identifier: Apache-2.0
"""Tools for tests: masks, references, tolerances, flags, processes. Names resolve on first use."""

from __future__ import annotations

import importlib

_HOME = {
    "DistTestBase": "dist_common",
    "FlagCombGenerator": "flag_generator",
    "GroundTruthDispatcher": "gt_dispatcher",
    "mask_families": "masks",
    "parameterize": "params",
    "random_slices": "masks",
    "ref_attn_func": "ref_attn",
    "run_processes": "spawn",
    "should_run_attn_config": "envvars",
    "should_run_test_case": "envvars",
    "should_run_world_size": "envvars",
    "skip_if_world_size_filtered": "envvars",
    "switch_envvar_context": "envvars",
    "switch_envvar_decorator": "envvars",
    "switch_envvars": "envvars",
    "with_comms": "dist_common",
    "with_run_in_mp": "dist_common",
}
_MODULES = {*_HOME.values(), "precision"}

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
