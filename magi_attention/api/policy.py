# SPDX-License-Identifier: Apache-2.0
"""From the environment snapshot to what the runtime does."""

from __future__ import annotations

from magi_attention.env import registry
from magi_attention.env.snapshot import RuntimeFlags
from magi_attention.functional.policy import AttnPolicy


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


class PolicyOfEnvironment:
    """The policy that the environment asks for now, to be called. It is made anew when a variable has another value:
    ``attend`` asks in every call, and to read all variables takes longer than to launch a kernel."""

    def __init__(self) -> None:
        self._read = registry.watch(*registry.names_in(registry.GENERAL, registry.COMMUNICATION))
        self._made_of: tuple[object, ...] | None = None
        self._policy = AttnPolicy()

    def __call__(self) -> AttnPolicy:
        """``ValueError`` or ``ContractError`` if a variable makes no sense."""
        values = self._read()
        if values != self._made_of:
            self._policy = policy_from_flags(RuntimeFlags.from_env())
            self._made_of = values
        return self._policy


policy_of_environment = PolicyOfEnvironment()
