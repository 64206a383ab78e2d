# SPDX-License-Identifier: Apache-2.0
"""``utils.nvtx``: named ranges on the timeline of a CUDA profiler."""

from magi_attention.compat.names import nvtx_range_pop, nvtx_range_push
from magi_attention.tools.profiling.nvtx import add_nvtx_event, instrument_nvtx, switch_profile

__all__ = ["add_nvtx_event", "instrument_nvtx", "nvtx_range_pop", "nvtx_range_push", "switch_profile"]
