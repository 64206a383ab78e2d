# SPDX-License-Identifier: Apache-2.0
"""The published names of ``functional.dist_attn``."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.errors import UnsupportedError
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.runtime import AttnRuntime

__all__ = ["DistAttnRuntime", "dist_attn_func"]


class _InstancesAreRuntimes(type(AttnRuntime)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, AttnRuntime)


class DistAttnRuntime(metaclass=_InstancesAreRuntimes):
    """The type that ``isinstance`` knows the runtime of a manager by. One cannot be made by hand: here a runtime comes
    of a plan of all ranks, and the published metas tell of one rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "A DistAttnRuntime cannot be made of a CommMeta and a CalcMeta; take the dist_attn_runtime of "
            "init_dist_attn_runtime_mgr(...)."
        )


def dist_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dist_attn_runtime: AttnRuntime,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """``(out, AttnForwardMeta)`` of the local rows, as ``magi_attention.api.calc_attn``."""
    out, *rest = dist_attn(q, k, v, dist_attn_runtime, sink, softmax_scale, softcap, return_max_logits)
    return out, AttnForwardMeta(*rest)
