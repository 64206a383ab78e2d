# SPDX-License-Identifier: Apache-2.0
"""Plans that are made while the training thread does something else."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import torch

from magi_attention.api.plan import Plan, make_plan
from magi_attention.api.policy import policy_of_environment
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.mask import Mask
from magi_attention.config import DistAttnConfig
from magi_attention.functional import ahead
from magi_attention.functional.policy import AttnPolicy
from magi_attention.kernels import default_registry
from magi_attention.kernels.ffa.ahead import KernelTiles
from magi_attention.meta.planner import check_heads


def plan_async(
    mask: Mask,
    cp_size: int,
    config: DistAttnConfig | None = None,
    *,
    rank: int,
    kernels: KernelTiles | None = None,
    **options: Any,
) -> Future[Plan]:
    """``make_plan(mask, cp_size, config, **options).prepare(rank, kernels)`` in a thread of its own.

    ``result()`` waits for the plan, and raises what ``make_plan`` or ``prepare`` raised. The thread ends with its plan,
    and the interpreter does not exit before it has; ``cancel()`` prevents a plan that has not been begun. Planning
    in C++ does not hold the lock of the interpreter, NumPy and Python do: a worker process of a data loader, which
    calls ``make_plan`` and ``prepare`` itself, takes nothing from the training thread.
    """
    future: Future[Plan] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            plan = make_plan(mask, cp_size, config, **options).prepare(rank, kernels)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(plan)

    # Not a pool, whose idle threads would be there when a data loader forks.
    threading.Thread(target=run, name="magi plan").start()
    return future


def kernel_tiles(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    head_dim_v: int | None = None,
    softcap: float = 0.0,
    group: Any = None,
    policy: AttnPolicy | None = None,
) -> KernelTiles | None:
    """What tile plans depend on besides the mask, for ``Plan.prepare``; None where kernels have none, as on a CPU.

    Ask once, in the process that trains; the answer can be sent to others, which need no GPU. Shapes, ``softcap`` and
    ``policy`` are those of ``attend``. Collective over the ``group`` on GPUs. ``NoBackendError`` if no kernel can run
    such calls, ``ContractError`` for bad head counts.
    """
    num_heads_q, num_heads_kv, head_dim = check_heads(num_heads_q, num_heads_kv, head_dim)
    is_single = group is None and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    transport = SingleTransport() if is_single else as_transport(group)
    policy = policy or policy_of_environment()
    heads, head_dims = (num_heads_q, num_heads_kv), (head_dim, head_dim if head_dim_v is None else head_dim_v)
    at = torch.device(device)
    return ahead.kernel_tiles(at, dtype, heads, head_dims, softcap, transport, default_registry(), policy)
