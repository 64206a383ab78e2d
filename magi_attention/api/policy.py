# SPDX-License-Identifier: Apache-2.0
"""From the environment snapshot to what the runtime does."""

from __future__ import annotations

from functools import lru_cache

from magi_attention.env.snapshot import RuntimeFlags
from magi_attention.functional.policy import AttnPolicy


@lru_cache(maxsize=64)  # attend asks in every call
def policy_from_flags(flags: RuntimeFlags) -> AttnPolicy:
    """The runtime's policy for one key; later changes of the environment do not reach it."""
    return AttnPolicy(
        backend=flags.kernel_backend.value,
        is_backend_explicit=flags.is_kernel_backend_explicit,
        precision=flags.precision.to_torch_dtype() if flags.precision is not None else None,
        deterministic=flags.deterministic,
        hide_tail_reduce=flags.hide_tail_reduce,
        high_precision_reduce=flags.bwd_high_precision_reduce,
        forward_high_precision_reduce=flags.fwd_high_precision_reduce,
        prefetch_all=not flags.max_connections_one,
        fwd_sm_margin=flags.fwd_sm_margin,
        bwd_sm_margin=flags.bwd_sm_margin,
        dsink_reduce=flags.dsink_all_reduce_op,
        check=flags.sanity_check,
        stage_mode=flags.stage_mode,
        hierarchical=flags.hierarchical_comm,
        node_sizes=flags.node_sizes,
        node_transport=flags.node_transport,
        head_chunks=flags.head_chunks,
    )
