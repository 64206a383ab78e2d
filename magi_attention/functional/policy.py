# SPDX-License-Identifier: Apache-2.0
"""``AttnPolicy``: how a plan is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi_attention.comm.exchange.choice import NODE_TRANSPORTS
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError

DSINK_REDUCES = ("none", "sum", "avg")
STAGE_MODES = ("staged", "fused", "auto")


@dataclass(frozen=True)
class AttnPolicy:
    """How a plan is run; fixed when the runtime is made.

    ``prefetch_all`` launches every fetch at once, otherwise one stage ahead. ``hide_tail_reduce`` keeps the last
    stage's keys from the forward pass and reduces their gradients first. ``high_precision_reduce`` sends partial
    dk, dv (and dq) in the accumulation dtype, ``forward_high_precision_reduce`` partial outputs where queries move.
    ``dsink_reduce`` is none, sum or avg over ranks. ``stage_mode``: "staged", one kernel per stage; "fused", one kernel
    per direction, fed by other ranks while it runs, or an error; "auto", fused where it can be. With
    ``hierarchical`` rows cross between nodes once for each node, where the caller finds out who shares one:
    ``node_sizes`` are ranks per node, one for all or one each, empty where the launcher says it. They cross by
    ``node_transport``: "nvshmem" or "gin", or an error; "all_to_all"; "auto", the first that all ranks have.
    ``head_chunks``: kv heads go through communication and attention in so many parts, one after the other, which
    divides partial results by as much. Rows of the next part travel beside the kernels of a part, so the buffers of
    rows are those of two parts. ``hide_tail_reduce`` is off then.
    """

    backend: str | None = None
    is_backend_explicit: bool = False
    precision: torch.dtype | None = None
    deterministic: bool = False
    hide_tail_reduce: bool = False
    high_precision_reduce: bool = False
    forward_high_precision_reduce: bool = False
    prefetch_all: bool = True
    fwd_sm_margin: int = 0
    bwd_sm_margin: int = 0
    dsink_reduce: str = "none"
    check: bool = False
    stage_mode: str = "staged"
    hierarchical: bool = False
    node_sizes: tuple[int, ...] = ()
    node_transport: str = "auto"
    head_chunks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("fwd_sm_margin", 0), ("bwd_sm_margin", 0), ("head_chunks", 1)):
            object.__setattr__(self, name, as_int(getattr(self, name), name, at_least=least))
        flags = ("is_backend_explicit", "deterministic", "hide_tail_reduce", "high_precision_reduce", "prefetch_all")
        for name in (*flags, "forward_high_precision_reduce", "check"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        modes = ("dsink_reduce", DSINK_REDUCES), ("stage_mode", STAGE_MODES), ("node_transport", NODE_TRANSPORTS)
        for name, choices in modes:
            if getattr(self, name) not in choices:
                raise ContractError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(choices)}.")
