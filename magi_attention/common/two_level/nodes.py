# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a node, that is, a network address and the links between its GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from magi_attention.errors import ContractError


@dataclass(frozen=True)
class Nodes:
    """``node_of[r]`` is the node of rank r; nodes have numbers from 0, in the order of their lowest ranks.

    Nodes may have different numbers of ranks, and the ranks of a node need not follow one another.
    """

    node_of: tuple[int, ...]

    @classmethod
    def of(cls, labels: Sequence[Hashable]) -> Nodes:
        """``labels[r]`` tells the node of rank r from all others, whatever it is."""
        numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(numbers[label] for label in labels))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], ranks: Sequence[int]) -> Nodes:
        """The nodes of a group with the global ranks ``ranks``, where global ranks fill one node after the other.

        Args:
            sizes: ranks per node; one size stands for all nodes, of which the last may have fewer.
            ranks: global rank of each rank of the group.
        Raises:
            ContractError: a size below 1, or several that leave out a rank.
        """
        if not sizes or any(size < 1 for size in sizes):
            raise ContractError(f"Node sizes {list(sizes)} must hold at least one rank each; give ranks per node.")
        if len(sizes) == 1:
            return cls.of([rank // sizes[0] for rank in ranks])
        filled = [node for node, size in enumerate(sizes) for _ in range(size)]
        if max(ranks) >= len(filled):
            raise ContractError(
                f"Nodes of {', '.join(map(str, sizes))} ranks have {len(filled)} in all, but there is a rank "
                f"{max(ranks)}; give the size of every node, or one for all."
            )
        return cls.of([filled[rank] for rank in ranks])

    @classmethod
    def of_config(cls, nodes: int | tuple[int, ...] | None, world: int) -> Nodes | None:
        """What ``DispatchConfig.nodes`` says of ``world`` ranks; None where it says nothing. ``ContractError`` if it
        names the nodes of another number of ranks."""
        if nodes is None:
            return None
        if isinstance(nodes, int):
            return cls.of_sizes([nodes], range(world))
        if len(nodes) != world:
            raise ContractError(
                f"DispatchConfig.nodes names the nodes of {len(nodes)} ranks, but there are {world}; give the node of "
                "each rank, or the number of ranks in a node."
            )
        return cls.of(nodes)

    @property
    def world(self) -> int:
        return len(self.node_of)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        found: list[list[int]] = [[] for _ in range(max(self.node_of, default=-1) + 1)]
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return tuple(tuple(ranks) for ranks in found)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """The place of each rank among the ranks of its node."""
        return tuple(self.members[node].index(rank) for rank, node in enumerate(self.node_of))

    def mates(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node of ``rank``, itself among them, ascending."""
        return self.members[self.node_of[rank]]

    def carrier(self, source: int, node: int) -> int:
        """Who takes the rows of ``source`` for another node: the rank with its place in the node, so that rows stay on
        one rail of the network; counted round where the node has fewer ranks."""
        ranks = self.members[node]
        return ranks[self.local[source] % len(ranks)]
