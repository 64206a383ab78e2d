# SPDX-License-Identifier: Apache-2.0
"""Copies of models that hold a key or a plan, pickling, and groups that were destroyed."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.common.mask import Mask
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing.spawn import run_processes

BOUNDS = torch.tensor([0, 13, 40])


def make_key(group):
    return api.magi_attn_varlen_key(BOUNDS, BOUNDS, 2, 2, 8, 0, group, causal=True)


class Holder(torch.nn.Module):
    def __init__(self, thing) -> None:
        super().__init__()
        self.thing, self.weight = thing, torch.nn.Parameter(torch.ones(1))


def test_a_copy_of_a_key_is_the_key(group):
    key = make_key(group)
    for copied in (copy.copy(key), copy.deepcopy(key), copy.deepcopy({"keys": [key]})["keys"][0]):
        assert copied is key
    ema = torch.optim.swa_utils.AveragedModel(Holder(key)).module
    assert ema.thing is key and ema.weight is not None
    x = torch.randn(40, 2, 8)
    assert torch.equal(api.calc_attn(x, x, x, ema.thing)[0], api.calc_attn(x, x, x, key)[0])
    manager = api.dist_attn_runtime_dict_mgr[key]
    assert copy.deepcopy(Holder(manager)).thing is manager


def test_a_key_is_not_pickled(group):
    key = make_key(group)
    things = (key, [key], Holder(key), api.dist_attn_runtime_dict_mgr[key])
    for thing in things:
        with pytest.raises(UnsupportedError, match="cannot be pickled.*Keep what it was made of"):
            pickle.dumps(thing)
        with pytest.raises(UnsupportedError, match="state_dict"):
            torch.save(thing, io.BytesIO())
    torch.save(Holder(key).state_dict(), io.BytesIO())


def test_plans_are_copied_and_pickled():
    plan, x = api.make_plan(Mask.varlen(BOUNDS, causal=True), 1), torch.randn(40, 2, 8)
    want = api.attend(x, x, x, plan)[0]
    file = io.BytesIO()
    torch.save(plan, file)
    file.seek(0)
    copies = (
        copy.copy(plan),
        copy.deepcopy(plan),
        pickle.loads(pickle.dumps(plan)),
        torch.load(file, weights_only=False),
    )
    for copied in (*copies, copy.deepcopy(Holder(plan)).thing):
        assert copied == plan and copied is not plan and type(copied) is api.Plan
        assert torch.equal(api.attend(x, x, x, copied)[0], want)
        compiled = torch.compile(lambda x, plan: api.attend(x, x, x, plan)[0], fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, copied), want)


def after_the_group_ended(rank: int, world: int, folder: str) -> list[str]:
    """What each use of an old key and an old plan says, after the group was destroyed and after there is a new one."""
    key, plan, old = (
        make_key(dist.group.WORLD),
        api.make_plan(Mask.varlen(BOUNDS, causal=True), world),
        dist.group.WORLD,
    )
    torch.manual_seed(0)
    whole = torch.randn(40, 2, 8)
    x, y = api.dispatch(whole, key), plan.shard(whole)
    q = x.clone().requires_grad_()
    out, want = api.calc_attn(q, q, q, key)[0], plan.gather(api.attend(y, y, y, plan)[0])
    dist.destroy_process_group()
    uses = (
        lambda: api.calc_attn(x, x, x, key), lambda: out.sum().backward(), lambda: api.undispatch(x, key),
        lambda: api.roll(x, 1, 0, key), lambda: api.roll_simple(x, 1, 0, key),
        lambda: api.attend(y, y, y, plan, old), lambda: plan.gather(y, old), lambda: make_key(old),
    )  # fmt: skip
    said = []
    for again in (False, True):
        if again:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        for use in uses:
            try:
                use()
                said.append("nothing")
            except ContractError as error:
                said.append(str(error))
    got = plan.gather(api.attend(y, y, y, plan)[0])
    new = make_key(dist.group.WORLD)
    x = api.dispatch(whole, new)
    same = api.undispatch(api.calc_attn(x, x, x, new)[0], new)
    return [*said, str(torch.equal(got, want)), str(torch.allclose(same, want))]


def test_a_key_of_a_destroyed_group_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        for said in run_processes(2, after_the_group_ended, str(Path(folder)), timeout_s=300):
            *said, got, same = said
            assert len(said) == 16 and all("process group was destroyed" in text for text in said), said
            assert got == same == "True"


def group_behind_a_held_plan(rank: int, world: int) -> bool:
    """Whether torch's group ended with ``destroy_process_group`` although a plan that used it is still held."""
    group, plan = dist.new_group(), api.make_plan(Mask.varlen(BOUNDS, causal=True), world)
    x = plan.shard(torch.randn(40, 2, 8), group).requires_grad_()
    plan.gather(api.attend(x, x, x, plan, group)[0], group).sum().backward()
    held = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return held() is None and plan.cp_size == world


def test_a_held_plan_does_not_hold_its_group():
    assert run_processes(2, group_behind_a_held_plan, timeout_s=300) == [True, True]
