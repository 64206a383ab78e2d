# SPDX-License-Identifier: Apache-2.0
"""MSA over ranks against a dense masked softmax whose mask is made query by query from the rule."""

from __future__ import annotations

import math

import pytest
import torch
from dense import dense_attention

from magi_attention import api
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.config import DispatchConfig, DistAttnConfig, MinHeapDispatchAlg
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels.index_attn import reference
from magi_attn_extensions import MSA
from magi_attn_extensions.MSA import selection

BLOCK = 128
HEADS, HEADS_KV, DIM, INDEX_DIM = 4, 2, 8, 6
CASES = [  # bounds of documents, world, chunk, options
    ([0, 700], 1, 64, dict(topk_blocks=2)),
    ([0, 40, 700, 1024], 2, 64, dict(topk_blocks=3)),
    ([0, 1024], 4, 128, dict(topk_blocks=3, init_blocks=1, local_blocks=2)),
    ([0, 130, 650, 901], 2, 128, dict(topk_blocks=2, local_blocks=0, high_precision_reduce=True)),  # padded
    ([0, 300, 301, 640], 3, 32, dict(topk_blocks=16, softmax_scale=0.9)),  # all blocks
]


def draw(total, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM), (HEADS_KV, INDEX_DIM), (1, INDEX_DIM)]
    return [torch.randn(total, *shape, generator=generator, dtype=dtype) for shape in shapes]


def dense_mask(index_q, index_k, bounds, config):
    """(Hk, T, T): the keys that each query sees, one at a time."""
    total = bounds[-1]
    allowed = torch.zeros(HEADS_KV, total, total, dtype=torch.bool)
    for first, last in zip(bounds, bounds[1:]):
        for t in range(first, last):
            own = (t - first) // BLOCK
            always = {b for b in range(own + 1) if b < config.init_blocks or b > own - config.local_blocks}
            for h in range(HEADS_KV):
                scores = index_k[first : t + 1, 0].float() @ index_q[t, h].float()
                best = [math.inf if b in always else float(x.max()) for b, x in enumerate(scores.split(BLOCK))]
                for b in sorted(range(own + 1), key=lambda b: -best[b])[: config.topk_blocks]:
                    allowed[h, t, first + b * BLOCK : min(first + (b + 1) * BLOCK, t + 1)] = True
    return allowed


@pytest.mark.parametrize("case", range(len(CASES)))
def test_over_ranks_it_is_dense_attention(case, monkeypatch):
    bounds, world, chunk, options = CASES[case]
    monkeypatch.setattr(reference, "BUDGET", 1 << 20)
    monkeypatch.setattr(selection, "BUDGET", 1 << 15)
    config = MSA.MsaConfig(**options)
    q, k, v, index_q, index_k = tensors = draw(bounds[-1], case)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(99), dtype=q.dtype)

    def rank(transport):
        how = DispatchConfig(chunk_size=chunk, uneven_shard=False, alg=MinHeapDispatchAlg())
        key = MSA.make_magi_msa_key(list(bounds), transport, config=config, dispatch_config=how)
        assert key == MSA.make_magi_msa_key(bounds, transport, config=config, dispatch_config=how)
        local = [MSA.dispatch(x, key) for x in tensors]
        leaves = [x.requires_grad_() for x in local[:3]]
        out = MSA.calc_msa(MSA.MsaV1Inputs(*leaves, *local[3:]), key).output
        grads = torch.autograd.grad(out, leaves, MSA.dispatch(dout, key))
        return [MSA.undispatch(x, key) for x in (out.detach(), *grads)]

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    allowed = dense_mask(index_q, index_k, bounds, config).repeat_interleave(HEADS // HEADS_KV, 0)
    want, _ = dense_attention(*leaves, allowed, options.get("softmax_scale", DIM**-0.5))
    wanted = [want, *torch.autograd.grad(want, leaves, dout)]
    for got in FakeWorld(world).run(rank):
        for a, b in zip(got, wanted):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("deterministic", (False, True))
def test_deterministic_reaches_the_kernels(deterministic, monkeypatch):
    """On a CPU the bits repeat either way, so what the kernels are asked for is looked at."""
    asked, attend = [], api.index_attn_func

    def seen(*args, **options):
        asked.append(options["deterministic"])
        return attend(*args, **options)

    monkeypatch.setattr(api, "index_attn_func", seen)
    tensors = draw(300, 5)

    def rank(transport):
        key = MSA.make_magi_msa_key([0, 300], transport, config=MSA.MsaConfig(deterministic=deterministic))
        return MSA.calc_msa(MSA.MsaV1Inputs(*(MSA.dispatch(x, key) for x in tensors)), key)

    FakeWorld(1).run(rank)
    assert asked == [deterministic]


def test_the_layout_is_that_of_the_dense_key_and_positions_are_of_documents():
    bounds, total = [0, 130, 650, 901], 901
    x = torch.arange(total)
    want = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:])])

    def rank(transport):
        how = DispatchConfig(chunk_size=64)
        key = MSA.make_magi_msa_key(bounds, transport, dispatch_config=how)
        cu, config = torch.tensor(bounds, dtype=torch.int32), DistAttnConfig(dispatch_config=how)
        dense = api.magi_attn_varlen_key(
            cu, cu, HEADS, HEADS_KV, DIM, 0, transport, causal=True, dist_attn_config=config
        )
        local = MSA.dispatch(x, key, pad_value=total - 1)
        assert torch.equal(local, api.dispatch(x, dense, pad_value=total - 1))
        assert torch.equal(MSA.get_position_ids(key).cpu(), want[local])
        return True

    assert FakeWorld(2).run(rank) == [True, True]


def test_rows_that_only_pad_see_nothing_and_are_seen_by_none():
    bounds = [0, 100, 150]

    def rank(transport):
        key = MSA.make_magi_msa_key(bounds, transport, dispatch_config=DispatchConfig(chunk_size=64))
        local = [MSA.dispatch(x, key, pad_value=1e3).requires_grad_() for x in draw(150, 1)]
        out = MSA.calc_msa(MSA.MsaV1Inputs(*local), key).output
        out.sum().backward()
        pads = MSA.dispatch(torch.ones(150), key) == 0
        assert out.isfinite().all() and not out[pads].any()
        assert all(not x.grad[pads].any() for x in local[:3]) and local[3].grad is None
        return int(pads.sum())

    assert sum(FakeWorld(2).run(rank)) > 0


def test_what_is_not_supported_is_refused():
    for name in ("kl_loss_coeff", "lse_loss_coeff"):
        with pytest.raises(UnsupportedError, match="Freeze its parameters"):
            MSA.MsaConfig(kernel_backend=MSA.MsaKernelBackend.MSAV1, **{name: 0.1})
    with pytest.raises(ContractError, match="give a positive number"):
        MSA.MsaConfig(indexer_softmax_scale=0.0)
    with pytest.raises(ContractError, match="topk_blocks must be"):
        MSA.MsaConfig(topk_blocks=0)

    def rank(transport):
        key = MSA.make_magi_msa_key([0, 64], transport)
        q, k, v, index_q, index_k = draw(64, 0)
        with pytest.raises(ContractError, match="give one of index_q for each of the 2 kv heads"):
            MSA.calc_msa(MSA.MsaV1Inputs(q, k, v, q, index_k), key)
        with pytest.raises(ContractError, match="Give 64 rows each"):
            MSA.calc_msa(MSA.MsaV1Inputs(q[1:], k, v, index_q, index_k), key)

    FakeWorld(1).run(rank)
