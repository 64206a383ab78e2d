# SPDX-License-Identifier: Apache-2.0
"""The published API on real gloo processes: results, failures, mismatches, meshes, sub-groups."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from magi_attention import api
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError, UnknownKeyError
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.spawn import run_processes
from magi_attention.testing.waiting import DEADLINE_S

TOTAL = 45
HEADS = (4, 2, 8)
CU = [0, 10, 31, 45]


def global_tensors():
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(TOTAL, h, 8, generator=gen, dtype=torch.float64) for h in (4, 2, 2)]


def make_key(group, cu=CU, config=None):
    cu = torch.tensor(cu, dtype=torch.int32)
    return api.magi_attn_varlen_key(cu, cu, *HEADS, 0, group, causal=True, dist_attn_config=config)


def expected():
    q, k, v = (x.requires_grad_() for x in global_tensors())
    out, meta = api.attend(q, k, v, api.make_plan(api.Mask.varlen(CU, causal=True), 1))
    out.square().sum().backward()
    return [x.detach() for x in (out, meta.lse, q.grad, k.grad, v.grad)]


def run_key(key):
    local = [api.dispatch(x, key).requires_grad_() for x in global_tensors()]
    out, meta = api.calc_attn(*local, key)
    out.square().sum().backward()
    return [api.undispatch(x.detach(), key) for x in (out, meta.lse, *(x.grad for x in local))]


def nodes_of(key):
    """As the dispatch of a key and its plan know them."""
    nodes = key.dist_attn_config.dispatch_config.nodes
    plan = api.magi_attn_interface.dist_attn_runtime_dict_mgr[key].plan
    assert (plan.nodes and plan.nodes.node_of) == nodes
    return nodes


def compare(results, wanted) -> None:
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results, wanted):
        assert (got - want).abs().max() < 1e-10, name


def pipeline(rank: int, world: int):
    os.environ["MAGI_ATTENTION_SANITY_CHECK"] = "1"
    wanted = expected()
    key = make_key(dist.group.WORLD)
    compare(run_key(key), wanted)
    assert api.get_most_recent_key(dist.group.WORLD) == key
    for degree in (0, 3):
        overlap = api.OverlapConfig(degree=degree, min_chunk_size=4)
        compare(run_key(make_key(dist.group.WORLD, config=api.DistAttnConfig(overlap_config=overlap))), wanted)
    os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = "1"
    compare(run_key(make_key(dist.group.WORLD)), wanted)
    del os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    compare(run_key(make_key(mesh)), wanted)
    assert nodes_of(make_key(mesh)) == (0, 0, 1, 1)
    whole, intra = make_key(mesh), make_key(mesh["intra"])
    assert api.get_most_recent_key(mesh) == whole and api.get_most_recent_key(mesh["intra"]) == intra
    api.clear_cache(mesh["intra"])
    with pytest.raises(UnknownKeyError):
        api.get_position_ids(intra)
    assert len(api.get_position_ids(whole))
    os.environ["MAGI_ATTENTION_HIERARCHICAL_COMM"] = "1"
    compare(run_key(make_key(mesh)), wanted)
    with pytest.raises(AssertionError, match="2-D"):
        make_key(dist.group.WORLD)
    with pytest.raises(AssertionError, match="2-D"):
        make_key(mesh["intra"])
    os.environ["MAGI_ATTENTION_NODE_SIZE"] = "3"  # nodes of 3 ranks and of 1
    compare(run_key(make_key(dist.group.WORLD)), wanted)
    assert nodes_of(make_key(dist.group.WORLD)) == (0, 0, 0, 1)
    del os.environ["MAGI_ATTENTION_NODE_SIZE"]
    os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun would have it
    compare(run_key(make_key(dist.group.WORLD)), wanted)
    assert nodes_of(make_key(dist.group.WORLD)) == (0, 0, 1, 1)
    del os.environ["MAGI_ATTENTION_HIERARCHICAL_COMM"]
    # No rank knows this variable of the others, and for dispatch alone nobody is asked.
    assert nodes_of(make_key(dist.group.WORLD)) is None
    del os.environ["GROUP_RANK"]

    later = dist.new_group([1, 2, 3])  # a context-parallel group without global rank 0
    if rank > 0:
        compare(run_key(make_key(later)), wanted)

    # Labels are rolled tokens; ints and a pad value of one's own go through.
    labels = api.roll(api.dispatch(torch.arange(TOTAL), key, pad_value=-100), -1, 0, key)
    rolled = api.undispatch(labels, key)
    assert rolled[:-1].tolist() == list(range(1, TOTAL)) and rolled[-1] in (0, -100)
    return True


def test_pipeline_on_four_processes() -> None:
    assert run_processes(4, pipeline) == [True] * 4


def agree(rank: int, world: int) -> None:
    os.environ["MAGI_ATTENTION_SANITY_CHECK"] = "1"
    compare(run_key(make_key(dist.group.WORLD)), expected())


def test_what_ranks_agree_on_does_not_depend_on_their_hashes_of_strings() -> None:
    """In fresh interpreters, as in training: forks of one server have the same."""
    run_processes(2, agree, fresh=True)


def moving_queries(rank: int, world: int) -> None:
    wanted = expected()
    os.environ["MAGI_ATTENTION_QO_COMM"] = "1"
    tokens = make_key(dist.group.WORLD)
    os.environ["MAGI_ATTENTION_FLATTEN_HEAD_GROUPS"] = "1"
    groups = make_key(dist.group.WORLD)
    for key in (tokens, groups):
        compare(run_key(key), wanted)
    cu = torch.tensor(CU, dtype=torch.int32)
    compare(run_key(api.make_varlen_key_for_new_mask_after_dispatch(cu, cu, groups, causal=True)), wanted)
    local = [api.dispatch(x, groups) for x in global_tensors()]
    with pytest.raises(NotImplementedError, match="no sink"):
        api.calc_attn(*local, groups, sink=torch.zeros(1, 4))


def test_moving_queries() -> None:
    planner_or_skip()
    run_processes(2, moving_queries)


def failures(rank: int, world: int) -> None:
    key = make_key(dist.group.WORLD)
    q, k, v = (api.dispatch(x, key) for x in global_tensors())

    with pytest.raises(ContractError if rank == 1 else PeerFailureError) as caught:
        api.calc_attn(q[:-1] if rank == 1 else q, k, v, key)
    message = str(caught.value)
    assert ("rows" in message) if rank == 1 else ("rank 1" in message.lower() and "rows" in message), message

    os.environ["MAGI_ATTENTION_SANITY_CHECK"] = "1"
    group = dist.new_group(list(range(world)))
    odd = make_key(group, cu=[0, 9, TOTAL] if rank == 2 else CU)
    locals_ = [api.dispatch(x, odd) for x in global_tensors()]
    with pytest.raises(PlanMismatchError, match="different plan"):
        api.calc_attn(*locals_, odd)

    compare(run_key(make_key(group)), expected())  # the group is whole again


def strangers(rank: int, world: int) -> dict[str, str]:
    """What is said of groups without this rank, and of DTensors."""
    told = {}
    group = dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        x = torch.zeros(TOTAL, 2, 8)
        plan = api.make_plan(api.Mask.varlen(CU, causal=True), 2)
        for name, action in {
            "key": lambda: make_key(group),
            "mesh": lambda: make_key(mesh),
            "attend": lambda: api.attend(x, x, x, plan, group),
            "shard": lambda: plan.shard(x, group),
        }.items():
            with pytest.raises(ContractError) as caught:
                action()
            told[name] = str(caught.value)
        return told
    key = make_key(group)
    q, k, v = (api.dispatch(x, key) for x in global_tensors())
    plan = api.make_plan(api.Mask.varlen(CU, causal=True), 2)
    api.attend(*(plan.shard(x, group) for x in global_tensors()), plan, group)
    dq = DTensor.from_local(q, mesh, [Replicate()])  # of the shape that a call before had
    for name, action in {
        "dispatch": lambda: api.dispatch(DTensor.from_local(global_tensors()[0], mesh, [Replicate()]), key),
        "undispatch": lambda: api.undispatch(dq, key),
        "calc_attn": lambda: api.calc_attn(dq, k, v, key),
        "attend": lambda: api.attend(plan.shard(q.new_zeros(TOTAL, 4, 8), group), *([dq] * 2), plan, group),
    }.items():
        with pytest.raises(ContractError) as caught:
            action()
        told[name] = str(caught.value)
    return told


def failures_and_strangers(rank: int, world: int) -> dict[str, str]:
    failures(rank, world)
    del os.environ["MAGI_ATTENTION_SANITY_CHECK"]
    return strangers(rank, world)


def test_failures_on_three_processes() -> None:
    """One rank failing fails all and says which; a rank outside the group and DTensors are named as what they are."""
    *members, outside = run_processes(3, failures_and_strangers)
    for name, text in outside.items():
        member = "is not in the device mesh [0, 1]" if name == "mesh" else "is not a member of the group"
        assert f"global rank 2) {member}" in text and "Only" in text and "members may call" in text, (name, text)
    for told in members:
        for name, text in told.items():
            remedy = "x.full_tensor(), which every rank holds" if name == "dispatch" else ".to_local()"
            assert "is a DTensor of shape" in text and remedy in text, (name, text)


def test_unknown_variable_is_named() -> None:
    env = {**os.environ, "MAGI_ATTENTION_SANITY_CHEK": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = "import magi_attention"
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0 and "MAGI_ATTENTION_SANITY_CHECK" in result.stderr
