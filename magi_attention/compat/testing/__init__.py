# SPDX-License-Identifier: Apache-2.0
"""Published helpers for tests. This module is ``testing.utils``."""

from __future__ import annotations

from functools import partial

import torch

from magi_attention.compat.testing.envvars import (
    should_run_attn_config,
    should_run_test_case,
    should_run_world_size,
    switch_envvar_context,
    switch_envvar_decorator,
    switch_envvars,
)

__all__ = ["should_run_attn_config", "should_run_test_case", "should_run_world_size", "switch_envvars"]

# ---- keys of test cases, variables that filter them, processes ----------------------------------------

NAME, SKIP_WORLD_SIZE, PROFILE_ONLY, INTERFACE = "name", "skip_world_size", "profile_only", "interface"
TEST_ATTN_CONFIG, TEST_WORLD_SIZE = "MAGI_ATTENTION_TEST_ATTN_CONFIG", "MAGI_ATTENTION_TEST_WORLD_SIZE"
RUN_IN_MP = "MAGI_ATTENTION_PARAMETERIZE_RUN_IN_MP"
DEVICE_TYPE = "cuda" if torch.cuda.device_count() > 1 else "cpu"
PG_DEFAULT_BACKEND = "nccl" if DEVICE_TYPE == "cuda" else "gloo"
NUM_DEVICES = min(4, torch.cuda.device_count()) if DEVICE_TYPE == "cuda" else 4

# ---- switches ------------------------------------------------------------------------------------------

_SWITCHES = {
    "deterministic_mode": "MAGI_ATTENTION_DETERMINISTIC_MODE",
    "sdpa_backend": "MAGI_ATTENTION_SDPA_BACKEND",
    "ffa_verbose_jit_build": "MAGI_ATTENTION_BUILD_VERBOSE",
}
switch_deterministic_mode_context = partial(switch_envvar_context, _SWITCHES["deterministic_mode"])
switch_deterministic_mode_decorator = partial(switch_envvar_decorator, _SWITCHES["deterministic_mode"])
switch_sdpa_backend_context = partial(switch_envvar_context, _SWITCHES["sdpa_backend"])
switch_sdpa_backend_decorator = partial(switch_envvar_decorator, _SWITCHES["sdpa_backend"])
switch_ffa_verbose_jit_build_context = partial(switch_envvar_context, _SWITCHES["ffa_verbose_jit_build"])
switch_ffa_verbose_jit_build_decorator = partial(switch_envvar_decorator, _SWITCHES["ffa_verbose_jit_build"])
