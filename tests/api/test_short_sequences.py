# SPDX-License-Identifier: Apache-2.0
"""Sequences of 0 to 20 tokens on 1 to 8 ranks, fewer tokens than ranks included, against dense float64."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, attend, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))
from oracle import truth  # noqa: E402

HQ, HK, D = 2, 1, 4


def problem(mask: Mask, seed: int):
    """q, k, v, the gradient of out, and the dense results."""
    gen = torch.Generator().manual_seed(seed)
    total = mask.total_q
    full = [torch.randn(total, h, D, dtype=torch.float64, generator=gen) for h in (HQ, HK, HK, HQ)]
    return full, truth(*full[:3], torch.from_numpy(mask.to_dense()), full[3], D**-0.5)


def cuts(total: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return sorted({0, total, *(draw.randrange(total + 1) for _ in range(3))})


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("uneven", [False, True])
def test_every_short_length(world, uneven) -> None:
    lengths = {1, world - 1, world, world + 1, 2 * world, 20, *random.Random(world + uneven).sample(range(2, 20), 4)}
    print("lengths", lengths)
    for total in sorted(lengths - {0}):
        seed = 100 * world + total
        cu = cuts(total, seed)
        mask = Mask.varlen(cu, causal=True)
        plan = make_plan(mask, world, DistAttnConfig(DispatchConfig(uneven_shard=uneven)))
        assert min(plan.shard_sizes) >= 1 and sum(plan.shard_sizes) == total + plan.pad_size
        assert not uneven or plan.pad_size == max(world - total, 0)
        (q, k, v, dout), want = problem(mask, seed)
        tokens = torch.arange(total)

        def rank(transport, plan=plan, tensors=(q, k, v), dout=dout, tokens=tokens):
            local = [plan.shard(x, transport).requires_grad_() for x in tensors]
            out, meta = attend(*local, plan, transport, return_max_logits=True)
            out.backward(plan.shard(dout, transport))
            got = [plan.gather(x.detach(), transport) for x in (out, *(x.grad for x in local))]
            labels = plan.gather(plan.labels(plan.shard(tokens, transport), group=transport), transport)
            return got, meta.max_logits, labels

        ends = {end - 1 for end in cu[1:]}
        for got, max_logits, labels in FakeWorld(world).run(rank):
            for mine, theirs in zip(got, (want.out, want.dq, want.dk, want.dv)):
                assert (mine - theirs).abs().max() < 1e-12, (world, total, cu)
            assert (max_logits - want.max_logits).abs().max() < 1e-12
            assert labels.tolist() == [-100 if i in ends else i + 1 for i in range(total)]


@pytest.mark.parametrize("world", [1, 3])
def test_no_token_is_a_sentence(world) -> None:
    with pytest.raises(ContractError, match="0 tokens; a plan needs at least one"):
        make_plan(Mask.causal(0), world)


def keys_of_few_tokens(rank: int, world: int) -> list[float]:
    """Largest error of out and dq for 1, 2, ... tokens under keys of the published API."""
    errors = []
    for total in range(1, world + 2):
        for uneven in (False, True):
            cu = torch.tensor([0, total], dtype=torch.int32)
            config = DistAttnConfig(DispatchConfig(uneven_shard=uneven))
            key = api.magi_attn_varlen_key(cu, cu, HQ, HK, D, 0, dist.group.WORLD, causal=True, dist_attn_config=config)
            (q, k, v, dout), want = problem(Mask.causal(total), total)
            local = [api.dispatch(x, key).requires_grad_() for x in (q, k, v)]
            out, _ = api.calc_attn(*local, key)
            out.backward(api.dispatch(dout, key))
            assert api.get_position_ids(key).max() <= total - 1
            got, dq = (api.undispatch(x.detach(), key) for x in (out, local[0].grad))
            errors += [float((got - want.out).abs().max()), float((dq - want.dq).abs().max())]
            other = api.make_varlen_key_for_new_mask_after_dispatch(cu, cu, key)
            assert api.calc_attn(*local, other)[0].shape == out.shape
    return errors


def test_keys_of_few_tokens() -> None:
    for errors in run_processes(3, keys_of_few_tokens):
        assert len(errors) == 16 and max(errors) < 1e-12
