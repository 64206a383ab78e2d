# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group share a node, from what all of them know alike: a dispatch must not differ between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from magi_attention.comm.collectives.hierarchical import NodeLevels, join_nodes
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.config import DistAttnConfig
from magi_attention.env import comm
from magi_attention.env.snapshot import RuntimeFlags


def is_hierarchical(transport: Transport, flags: RuntimeFlags) -> bool:
    """Do rows of this group travel in two levels?"""
    return flags.hierarchical_comm and transport.size > 1


def node_levels(transport: Transport, mesh: DeviceMesh | None, flags: RuntimeFlags) -> NodeLevels:
    """The nodes of a 2-D mesh, or else those that the environment declares; collective at a group's first key."""
    if mesh is None or mesh.ndim < 2:
        return join_nodes(transport, flags.node_sizes, comm.launcher_node())
    return NodeLevels(_nodes_of_mesh(transport, mesh), as_transport(mesh.get_group(1)))


def with_nodes(config: DistAttnConfig, group: Any, mesh: DeviceMesh | None, flags: RuntimeFlags) -> DistAttnConfig:
    """``config`` with the nodes of the group's ranks for dispatch, if it does not name them itself.

    A 2-D mesh says them, or ``MAGI_ATTENTION_NODE_SIZE``, or, where rows travel in two levels, what the ranks have told
    one another (``node_levels``). Nothing is asked of other ranks for this alone. Where all ranks share a node, or no
    two of them do, nodes change nothing, and ``config`` stays as it is.
    """
    transport, dispatch = as_transport(group), config.dispatch_config
    if dispatch.nodes is not None or transport.size == 1:
        return config
    if mesh is not None and mesh.ndim == 2:
        nodes = _nodes_of_mesh(transport, mesh)
    elif is_hierarchical(transport, flags):
        nodes = node_levels(transport, mesh, flags).nodes
    elif flags.node_sizes:
        nodes = Nodes.of_sizes(flags.node_sizes, transport.ranks)
    else:
        return config
    if not 1 < len(nodes.members) < nodes.world:
        return config
    return DistAttnConfig(replace(dispatch, nodes=nodes.node_of), config.overlap_config, config.grpcoll_config)


def _nodes_of_mesh(transport: Transport, mesh: DeviceMesh) -> Nodes:
    node_of = {rank: node for node, ranks in enumerate(mesh.mesh.tolist()) for rank in ranks}
    return Nodes.of([node_of[rank] for rank in transport.ranks])
