# SPDX-License-Identifier: Apache-2.0
"""Cross-attention over keys that every rank holds: as a dense mask, pair by pair, and as one process on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    attend,
    attend_replicated_kv,
    make_plan,
    sum_gradients,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError
from magi_attention.testing.spawn import run_processes

F64 = torch.float64
CU, CU_TEXT = [0, 5, 18, 29], [0, 3, 4, 11]


def cumulative(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def dense(q, k, v, lengths, scale, softcap):
    """Document by document, by the definition; out and lse."""
    outs, lses = [], []
    of_q, of_k = (list(part) for part in zip(*lengths))
    for x, keys, values in zip(q.split(of_q), k.split(of_k), v.split(of_k)):
        group = x.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        logits = torch.einsum("qhd,khd->qhk", x, keys) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        weights = logits.softmax(2) if len(keys) else logits
        outs.append(torch.einsum("qhk,khd->qhd", weights, values))
        lses.append(logits.logsumexp(2) if len(keys) else x.new_full(x.shape[:2], float("-inf")))
    return torch.cat(outs), torch.cat(lses)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 7)), min_size=1, max_size=6).filter(
        lambda found: sum(n for n, _ in found) > 0
    ),
    world=st.sampled_from([1, 2, 3]),
    chunk=st.integers(1, 5),
    uneven=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_as_document_by_document(lengths, world, chunk, uneven, softcap, seed) -> None:
    """Empty documents of queries and of keys, pad rows, lengths that do not divide; gradients of k and v add up."""
    rng = torch.Generator().manual_seed(seed)
    cu_q, cu_k = (cumulative(list(part)) for part in zip(*lengths))
    plan = make_plan(Mask.causal(cu_q[-1]), world, DistAttnConfig(DispatchConfig(chunk, uneven)))
    q, dout = (torch.randn(cu_q[-1], 6, 4, generator=rng, dtype=F64) for _ in range(2))
    k, v = (torch.randn(cu_k[-1], 2, 4, generator=rng, dtype=F64) for _ in range(2))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*whole, lengths, 0.3, softcap)
    want = [out, lse, *torch.autograd.grad((out * dout).sum(), whole, materialize_grads=True)]

    def rank(transport):
        local = [plan.shard(q, transport, 7.0), k.clone(), v.clone()]
        local = [x.requires_grad_() for x in local]
        out, meta = attend_replicated_kv(
            *local, plan, cu_k, transport, cu_seqlens_q=torch.tensor(cu_q), softmax_scale=0.3, softcap=softcap
        )
        grads = torch.autograd.grad((out * plan.shard(dout, transport, 5.0)).sum(), local)
        is_pad = torch.from_numpy(plan.position_array(transport.rank)) >= plan.total_tokens
        assert not out[is_pad].any() and not grads[0][is_pad].any() and meta.lse[is_pad].isneginf().all()
        return [*(plan.gather(x.detach(), transport) for x in (out, meta.lse, grads[0])), *grads[1:]]

    results = FakeWorld(plan.cp_size).run(rank)
    for got in results:
        for name, a, b in zip(("out", "lse", "dq"), got, want):
            torch.testing.assert_close(a, b.detach(), atol=1e-11, rtol=1e-11, msg=name)
    for name, parts, b in zip(("dk", "dv"), list(zip(*results))[3:], want[3:]):
        torch.testing.assert_close(sum(parts), b, atol=1e-11, rtol=1e-11, msg=name)


class VideoLayer(nn.Module):
    """Self-attention of frames, and cross-attention to a text that parameters of this model encode."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q = nn.Linear(16, 3 * 16), nn.Linear(16, 16)
        self.text, self.kv = nn.Embedding(11, 8), nn.Linear(8, 2 * 8)

    def forward(self, video, text, plan, text_plan):
        q, k, v = self.qkv(video).view(-1, 12, 4).split(4, 1)
        mixed = attend(q, k, v, plan)[0].flatten(1)
        if text_plan is None:  # every rank encodes all of the text, or its own part
            states = self.text(text)
        else:
            states = text_plan.gather(self.text(text_plan.shard(text)), is_partial_grad=True)
        k, v = self.kv(states).view(-1, 4, 4).split(2, 1)
        return mixed + attend_replicated_kv(self.q(mixed).view(-1, 4, 4), k, v, plan, CU_TEXT)[0].flatten(1)


def step(plan, compiled: bool = False, text_plan=None) -> list[torch.Tensor]:
    """Loss of all ranks, the gradient of the video and those of all parameters."""
    torch.manual_seed(0)
    model = VideoLayer().double()
    video, text = torch.randn(CU[-1], 16, dtype=F64), torch.randint(0, 11, (CU_TEXT[-1],))
    target = torch.randn(CU[-1], 16, dtype=F64)
    local = plan.shard(video).requires_grad_()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    is_real = torch.from_numpy(plan.position_array(dist.get_rank() if plan.cp_size > 1 else 0)) < CU[-1]
    loss = ((run(local, text, plan, text_plan) - plan.shard(target)).square() * is_real[:, None]).sum()
    loss.backward()
    if plan.cp_size > 1:
        sum_gradients(model)
        dist.all_reduce(loss.detach())
    return [loss.detach(), plan.gather(local.grad), *(p.grad for p in model.parameters())]


def on_ranks(rank: int, world: int) -> list[list[torch.Tensor]]:
    plan = make_plan(Mask.block_causal(CU, 3), world, DistAttnConfig(DispatchConfig(chunk_size=4)))
    assert plan.pad_size
    found = [step(plan), step(plan, compiled=True)]
    shifted = plan.with_mask(Mask.varlen(CU, window=(4, 0)))  # the cross-attention of a plan depends on documents alone
    found.append(step(plan, text_plan=make_plan(Mask.full(CU_TEXT[-1]), world)))
    return [*found, step(shifted), step(make_plan(Mask.varlen(CU, window=(4, 0)), 1))]


def test_two_ranks_are_as_one_process() -> None:
    want = step(make_plan(Mask.block_causal(CU, 3), 1))
    for eager, compiled, spread, shifted, shifted_alone in run_processes(2, on_ranks):
        for got, wanted in ((eager, want), (compiled, want), (spread, want), (shifted, shifted_alone)):
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_ranges_of_the_last_prompt_are_kept_and_no_others() -> None:
    plan = make_plan(Mask.varlen([0, 4, 9], causal=True), 1)
    q, k = torch.randn(9, 2, 4), torch.randn(8, 2, 4)
    first = attend_replicated_kv(q, k, k, plan, [0, 3, 8])[0]
    size = plan.nbytes
    for middle in range(9):
        attend_replicated_kv(q, k, k, plan, [0, middle, 8])
    assert plan.nbytes == size
    assert torch.equal(attend_replicated_kv(q, k, k, plan, torch.tensor([0, 3, 8]))[0], first)


def test_wrong_calls_are_sentences() -> None:
    plan, tree = make_plan(Mask.varlen([0, 4, 9]), 1), make_plan(Mask.prefix_tree([4, 5], [-1, 0]), 1)
    q, k = torch.randn(9, 2, 4), torch.randn(8, 2, 4)
    for words, change in {
        "q has 8 rows, and rank 0 holds 9": {"q": k},
        "cu_seqlens_k end at 7, but k has 8 rows": {"cu_seqlens_k": [0, 3, 7]},
        "2 query documents and 1 key documents": {"cu_seqlens_k": [0, 8]},
        "cu_seqlens_q end at 8, but the plan has 9": {"cu_seqlens_q": [0, 3, 8]},
        "cu_seqlens_k decreases": {"cu_seqlens_k": [0, 9, 8]},
        "does not know its documents.*cu_seqlens_q=": {"plan": tree},
    }.items():
        arguments = {"q": q, "k": k, "v": k, "plan": plan, "cu_seqlens_k": [0, 3, 8], **change}
        with pytest.raises(ContractError, match=words):
            attend_replicated_kv(**arguments)
