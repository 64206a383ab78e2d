# SPDX-License-Identifier: Apache-2.0
"""torchtitan's training over CPUs and gloo, to try a config where there are no GPUs. torchtitan 0.3.0 knows GPUs only.

    torchrun --nproc-per-node 2 torchtitan_on_cpu.py --module torchtitan_configs --config llama3_debugmodel_magi \\
        --parallelism.context_parallel_degree 2

The arguments are those of torchtitan.train. With torch 2.13 give ``--parallelism.spmd_backend full_dtensor`` as well.
"""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.fsdp import FSDPModule

IS_NEW = hasattr(dist, "set_timeout")  # torch 2.14, which torchtitan 0.3.0 is for


def know_cpus() -> None:
    """Call it before torchtitan is imported, which asks torch for its device then."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**34)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.current_device = lambda: 0

    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_a_sum(module: FSDPModule, factor: float) -> None:
        """gloo has no reduction that multiplies."""
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_a_sum
    if not IS_NEW:
        dist.set_timeout = lambda timeout, group: None
        # Several functional all-gathers or reduce-scatters under way corrupt the heap with torch 2.13 over gloo, in a
        # plain loop as well. So each is waited for at once.
        functional_collectives._maybe_wrap_tensor = functional_collectives.wait_tensor


if __name__ == "__main__":
    know_cpus()
    runpy.run_module("torchtitan.train", run_name="__main__")
