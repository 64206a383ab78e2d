# SPDX-License-Identifier: Apache-2.0
"""Nodes of a group for its dispatch: the config's own, a mesh's, the environment's; the same on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from magi_attention.api import AttnRanges, DispatchConfig, DistAttnConfig, magi_attn_flex_key
from magi_attention.api.keys.interface import dist_attn_runtime_dict_mgr
from magi_attention.api.planning.group_nodes import with_nodes
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.env.snapshot import RuntimeFlags


def nodes_by_rank(world: int, mesh=None, config: DispatchConfig | None = None) -> list:
    given, flags = DistAttnConfig(config), RuntimeFlags.from_env()

    def nodes_of(transport):
        return with_nodes(given, transport, mesh, flags).dispatch_config.nodes

    return FakeWorld(world).run(nodes_of)


def mesh_of(*ranks) -> SimpleNamespace:
    return SimpleNamespace(ndim=torch.tensor(ranks).ndim, mesh=torch.tensor(ranks))


def test_nobody_says_it() -> None:
    assert nodes_by_rank(4) == [None] * 4 == nodes_by_rank(4, mesh_of(0, 1, 2, 3))


@pytest.mark.parametrize("sizes, wanted", [("2", (0, 0, 1, 1)), ("1,3", (0, 1, 1, 1)), ("4", None), ("1", None)])
def test_the_environment(sizes, wanted, monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_NODE_SIZE", sizes)
    assert nodes_by_rank(4) == [wanted] * 4


def test_a_mesh_comes_first_and_the_config_before_it(monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_NODE_SIZE", "3,1")
    mesh = mesh_of([0, 2], [1, 3])  # nodes whose ranks do not follow one another
    assert nodes_by_rank(4, mesh) == [(0, 1, 0, 1)] * 4
    assert nodes_by_rank(4, mesh, DispatchConfig(nodes=2)) == [2] * 4


def test_a_key_has_the_nodes_of_its_group(monkeypatch) -> None:
    """Its plan, too, and the rest of the config stays."""
    cuts = [0, 300, 320, 700, 1000, 1024]
    documents = AttnRanges.from_ranges([[a, b] for a, b in zip(cuts, cuts[1:])])

    def plan_of(transport):
        config = DistAttnConfig(DispatchConfig(chunk_size=16))
        key = magi_attn_flex_key(documents, documents, "causal", 1024, 1024, 4, 2, 8, 0, transport, config)
        assert key.chunk_size == 16
        return dist_attn_runtime_dict_mgr[key].plan

    assert {plan.nodes for plan in FakeWorld(4).run(plan_of)} == {None}
    monkeypatch.setenv("MAGI_ATTENTION_NODE_SIZE", "2")
    plans = FakeWorld(4).run(plan_of)
    assert len(set(plans)) == 1 and plans[0].nodes.members == ((0, 1), (2, 3))
