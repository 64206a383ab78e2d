# SPDX-License-Identifier: Apache-2.0
"""The backward kernels where they are used: compiled, in CUDA graphs, recomputed, in stages, in a training run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, truth
from forward_oracle import make_inputs
from graph_capture import capture
from test_ffa_backward import DEVICE, differentiate, explicit_backend_in_poisoned_memory, pytestmark  # noqa: F401
from torch.utils.checkpoint import checkpoint

from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, gather, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import default_registry
from magi_attention.kernels.types import Grads
from magi_attention.meta.planner import build_plan
from magi_attention.testing import masks


def leaves_of(x) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]


def test_compiled_whole():
    x = make_inputs(0, masks.causal(300), 300, 300, (8, 2), (128, 128), device=DEVICE)
    dout, leaves = make_dout(x), leaves_of(x)

    def model(q, k, v, *ranges):
        out, _ = flex_flash_attn_func(q, k, v, *ranges)
        return out * 2

    torch._dynamo.reset()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(*leaves, *x.ranges)
    out.backward(dout / 2)
    assert_grads(x, Grads(*(t.grad for t in leaves)), truth(x, dout))


def test_cuda_graph_of_forward_and_backward_follows_values_and_ranges():
    x = make_inputs(0, masks.varlen([0, 100, 300], 1), 300, 300, (8, 2), (128, 128), device=DEVICE)
    dout, leaves, ranges = make_dout(x), leaves_of(x), x.ranges

    def step():
        out, _ = flex_flash_attn_func(*leaves, *ranges)
        return torch.autograd.grad(out, leaves, dout)

    graph, _, got = capture(step, warm_ups=2)
    for seed, (cu, kind) in enumerate((([0, 100, 300], 1), ([0, 1, 300], 2), ([0, 299, 300], 0))):
        new = make_inputs(seed, masks.varlen(cu, kind), 300, 300, (8, 2), (128, 128), device=DEVICE)
        new_dout = make_dout(new, seed)
        with torch.no_grad():
            for old, fresh in zip((*leaves, *ranges, dout), (new.q, new.k, new.v, *new.ranges, new_dout)):
                old.copy_(fresh)
        for grad in got:
            grad.fill_(float("nan"))
        graph.replay()
        assert_grads(new, Grads(*got), truth(new, new_dout), cu)


def test_activations_can_be_recomputed():
    x = make_inputs(0, masks.varlen([0, 70, 300], 1), 300, 300, (8, 2), (128, 128), device=DEVICE)
    dout, ranges, got = make_dout(x), x.ranges, []
    for is_recomputed in (False, True):
        leaves = leaves_of(x)

        def attend(q, k, v):
            return flex_flash_attn_func(q, k, v, *ranges)[0]

        out = checkpoint(attend, *leaves, use_reentrant=False) if is_recomputed else attend(*leaves)
        out.backward(dout)
        got.append(Grads(*(t.grad for t in leaves)))
    assert_same(got[1], got[0], x.q.dtype)
    assert_grads(x, got[0], truth(x, dout))


def test_edited_ranges_are_seen_by_the_next_backward():
    ranges = masks.varlen([0, 100, 300], 1)
    x = make_inputs(0, ranges, 300, 300, device=DEVICE)
    dout, leaves, mask = make_dout(x), leaves_of(x), x.ranges
    for cu in ([0, 100, 300], [0, 20, 300], [0, 250, 300]):
        new = make_inputs(0, masks.varlen(cu, 1), 300, 300, device=DEVICE)
        for old, fresh in zip(mask, new.ranges):
            old.copy_(fresh)
        out, _ = flex_flash_attn_func(*leaves, *mask)
        assert_grads(new, Grads(*torch.autograd.grad(out, leaves, dout)), truth(new, dout), cu)


def test_streams_do_not_disturb_one_another():
    cases = [make_inputs(n, masks.causal(400), 400, 400, (8, 2), (128, 128), device=DEVICE) for n in range(3)]
    streams, got = [torch.cuda.Stream() for _ in cases], []
    douts = [make_dout(x) for x in cases]
    torch.cuda.synchronize()
    for _ in range(4):
        for x, dout, stream in zip(cases, douts, streams):
            with torch.cuda.stream(stream):
                got.append((x, dout, differentiate(x, dout)))
    torch.cuda.synchronize()
    wants = [truth(x, dout) for x, dout in zip(cases, douts)]
    for n, (x, _, grads) in enumerate(got):
        assert_grads(x, grads, wants[n % 3])


def run_rank(transport, plan, policy, tensors, sink):
    """One rank of distributed attention; (out, dq, dk, dv) of all tokens and this rank's dsink."""
    # Each rank is a thread. The backward has to stay on it: torch's one thread per GPU would wait for itself.
    with torch.autograd.set_multithreading_enabled(False):
        layout = TokenLayout(plan, transport)
        runtime = AttnRuntime(plan, transport, default_registry(), policy)
        q, k, v, dout = (shard(x, layout).detach().requires_grad_() for x in tensors)
        sink = None if sink is None else sink.detach().clone().requires_grad_()
        out, _, _ = dist_attn(q, k, v, runtime, sink)
        out.backward(dout.detach())
        full = [gather(x.detach(), layout) for x in (out, q.grad, k.grad, v.grad)]
        return *full, None if sink is None else sink.grad


@pytest.mark.parametrize("size, degree, hide_tail", [(1, 1, False), (2, 0, False), (2, 1, False), (2, 2, True)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_distributed_attention(size, degree, hide_tail, with_sink):
    """Host and remote stages of ranks that share the GPU, against exact gradients and the reference backend."""
    total = 320
    slices = SliceTable(masks.random_slices(np.random.default_rng(size + degree), total, total, max_slices=12))
    sink_shape = (2, 4) if with_sink else None
    x = make_inputs(0, slices, total, total, (4, 2), (64, 64), device=DEVICE, sink_shape=sink_shape)
    dout = make_dout(x)
    config = DistAttnConfig(DispatchConfig(32), OverlapConfig(degree=degree, min_chunk_size=16))
    plan, want = build_plan(slices, total, size, config=config), truth(x, dout)
    for backend in ("ffa", "sdpa_ol"):
        policy = AttnPolicy(
            backend=backend, is_backend_explicit=True, hide_tail_reduce=hide_tail, high_precision_reduce=True,
            dsink_reduce="sum",
        )  # fmt: skip
        for out, dq, dk, dv, dsink in FakeWorld(size).run(run_rank, plan, policy, (x.q, x.k, x.v, dout), x.sink):
            assert not out.isnan().any()
            assert_grads(x, Grads(dq, dk, dv, dsink), want, (backend, size, degree))


class Block(torch.nn.Module):
    """Attention and MLP with weights in float32; q, k, v go to attention in bfloat16, or not at all rounded."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, ranges, dtype):
        q, k, v = self.qkv(self.norms[0](x)).to(dtype).view(len(x), 3, self.heads, self.dim).unbind(1)
        attended, _ = flex_flash_attn_func(q, k, v, *ranges)
        x = x + self.out(attended.flatten(1).float())
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


def train(steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Losses (steps,) of a 4-layer transformer that learns to repeat the token of three places before."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 256, 128, 32
    embed = torch.nn.Embedding(vocabulary, width).to(DEVICE)
    torch.nn.init.normal_(embed.weight, std=0.1)
    blocks = torch.nn.ModuleList(Block(width, 2) for _ in range(4)).to(DEVICE)
    place = torch.nn.Parameter(0.1 * torch.randn(tokens, width, device=DEVICE))
    optimizer = torch.optim.AdamW([*embed.parameters(), *blocks.parameters(), place], lr=1e-3)
    ranges = tuple(x.to(DEVICE) for x in masks.varlen([0, 100, 256], 1).tensors())
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for _ in range(steps):
        x = embed(ids) + place
        for block in blocks:
            x = block(x, ranges, dtype)
        loss = torch.nn.functional.cross_entropy(x[3:] @ embed.weight.T, ids[:-3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_training_run(monkeypatch):
    """50 steps by ``ffa`` and by the reference.

    The bound: rounding q, k, v to bfloat16 moves the losses of the reference by some amount. The kernels round the
    weights, their gradients and out likewise, that is some three times as often, and errors grow alike along the steps.
    So four times that amount, and 0.1% of the first loss in case that it happens to be small.
    """
    losses = {}
    for backend, dtype in (("ffa", torch.bfloat16), ("sdpa_ol", torch.bfloat16), ("sdpa_ol", torch.float32)):
        monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", backend)
        losses[backend, dtype] = train(50, dtype)
    ours, reference, exact = losses.values()
    assert reference[-1] < 0.5 * reference[0], "nothing is learnt, so nothing is compared"
    bound = 4 * (reference - exact).abs().max() + 1e-3 * reference[0]
    assert (ours - reference).abs().max() <= bound
