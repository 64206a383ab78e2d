# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's packed documents with pads: real rows against a dense mask in float64, pad rows against 0."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

import torch.distributed as dist  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.megatron import CoreAttention  # noqa: E402
from magi_attention.testing.spawn import run_processes  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, SEEDS = 4, 2, 8, range(6)
CASES = {
    "bidirectional": (AttnMaskType.padding, {}),
    "no mask": (AttnMaskType.no_mask, {}),
    "causal": (AttnMaskType.padding_causal, {}),
    "bidirectional window": (AttnMaskType.padding, {"window_size": (5, 3)}),
    "causal window": (AttnMaskType.padding_causal, {"window_size": (5, 0)}),
    "sink": (AttnMaskType.padding, {"softmax_type": "off-by-one"}),
}


def make(kind: AttnMaskType, cp_group=None, **options) -> CoreAttention:
    cp_size = 1 if cp_group is None else cp_group.size()
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
        use_cpu_initialization=True, attention_dropout=0.0, context_parallel_size=cp_size, log_max_attention_logit=True,
        **options,
    )  # fmt: skip

    class Groups:
        tp = type("Group", (), {"size": staticmethod(lambda: 1)})
        cp = cp_group

    return CoreAttention(config, 1, kind, "self", pg_collection=Groups)


def random_documents(seed: int) -> tuple[list[int], list[int]]:
    """Real and padded cumulative lengths for up to two ranks; documents may be empty, pads may be long."""
    rng = np.random.default_rng(seed)
    real = rng.integers(0, 14, int(rng.integers(2, 6)))
    padded = -(-real // 4) * 4 + 4 * rng.integers(0, 2, len(real))
    real[0], padded[0] = 5, 8
    return [0, *real.cumsum().tolist()], [0, *padded.cumsum().tolist()]


def params(real: list[int], padded: list[int] | None) -> PackedSeqParams:
    cu = torch.tensor(real, dtype=torch.int32)
    cu_padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu.clone(), cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
    )  # fmt: skip


def tensors(real: list[int], padded: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """q, k, v and a gradient, pads of 100 in all; the document of each row; which rows are real."""
    generator = torch.Generator().manual_seed(padded[-1])
    shapes = [(padded[-1], heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    document = torch.bucketize(torch.arange(padded[-1]), torch.tensor(padded[1:]), right=True)
    offset = torch.arange(padded[-1]) - torch.tensor(padded)[document]
    is_real = offset < torch.tensor(real).diff()[document]
    for x in made:
        x[~is_real] = 100.0
    return made, document, is_real


def dense(name: str, real: list[int], padded: list[int]) -> dict[str, torch.Tensor]:
    kind, options = CASES[name]
    (q, k, v, g), document, is_real = tensors(real, padded)
    for x in (q, k, v):
        x.requires_grad_()
    row = torch.arange(padded[-1])
    back = row[:, None] - row
    seen = (document[:, None] == document) & is_real[:, None] & is_real
    left, right = options.get("window_size", (-1, -1))
    if left >= 0:
        seen &= (back <= left) & (back >= -right)
    if kind is AttnMaskType.padding_causal:
        seen &= back >= 0
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * HEAD_DIM**-0.5
    logits = logits.masked_fill(~seen, float("-inf"))
    sink = 1.0 if "softmax_type" in options else 0.0
    weights = logits.exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sink).clamp(min=1e-300)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(HEADS // KV_HEADS, 1))
    grads = torch.autograd.grad(out, (q, k, v), g)
    top = logits.detach().amax((1, 2))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads)), "top": top}


def local_rows(padded: list[int], cp: int, rank: int) -> torch.Tensor:
    """Chunks ``rank`` and ``2 cp - 1 - rank`` of each document, as Megatron shares them out."""
    parts = [torch.arange(a, b).view(2 * cp, -1) for a, b in zip(padded, padded[1:])]
    return torch.cat([x[r] for x in parts for r in (rank, 2 * cp - 1 - rank)])


def attend_locally(rank: int, world: int) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """Rows of the output and the gradients in their places, 0 elsewhere, for each case and seed."""
    results = {}
    for name, (kind, options) in CASES.items():
        core = make(kind, dist.group.WORLD if world > 1 else None, **options)
        for seed in SEEDS:
            real, padded = random_documents(seed)
            rows = local_rows(padded, world, rank)
            q, k, v, g = (x[rows] for x in tensors(real, padded)[0])
            for x in (q, k, v):
                x.requires_grad_()
            core.current_max_attn_logits = None
            out = core(q, k, v, None, attn_mask_type=kind, packed_seq_params=params(real, padded)).view_as(q)
            grads = torch.autograd.grad(out, (q, k, v), g)
            found = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads))}
            whole = {n: x.new_zeros(padded[-1], *x.shape[1:]).index_copy(0, rows, x) for n, x in found.items()}
            results[name, seed] = {**whole, "top": core.current_max_attn_logits}
    return results


@functools.cache
def over_ranks(world: int) -> list[dict]:
    return [attend_locally(0, 1)] if world == 1 else run_processes(world, attend_locally)


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_real_rows_do_not_see_pads(name, seed, world):
    real, padded = random_documents(seed)
    want, is_real = dense(name, real, padded), tensors(real, padded)[2]
    parts = [result[name, seed] for result in over_ranks(world)]
    for what in ("out", "dq", "dk", "dv"):
        got = sum(part[what] for part in parts)
        assert got.dtype == torch.float64
        assert torch.allclose(got, want[what], rtol=0, atol=1e-10), (what, seed)
        assert not got[~is_real].any(), (what, seed)
    for part in parts:
        assert torch.allclose(part["top"].double(), want["top"], rtol=1e-6), seed


def call(packed: PackedSeqParams, tokens: int = 12) -> torch.Tensor:
    q, k, v = (torch.randn(tokens, n, HEAD_DIM, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    return make(AttnMaskType.padding)(q, k, v, None, packed_seq_params=packed)


def test_repeated_ends_are_empty_documents():
    want = call(params([0, 3, 8], [0, 4, 12]))
    assert torch.equal(call(params([0, 3, 8, 8, 8], [0, 4, 12, 12, 12])), want)
    assert torch.equal(call(params([0, 4, 12, 12], None)), call(params([0, 4, 12], None)))
    assert not torch.equal(call(params([0, 4, 12], None)), want)


@pytest.mark.parametrize(
    ("real", "padded", "words"),
    (
        ([0, 4, 12, -1], None, r"cu_seqlens_q is -1 from entry 3 on, .*give .* cu_seqlens_q\[:3\]"),
        ([0, 3, 8, -1], [0, 4, 12, -1], r"cu_seqlens_q is -1 .*cu_seqlens_q\[:3\]"),
        ([0, 3, 8], [0, 4, -1], r"cu_seqlens_q_padded is -1 .*cu_seqlens_q_padded\[:2\]"),
        ([0, 8, 4, 12], None, "decreases from 8 to 4"),
        ([4, 8, 12], None, "starts at 4"),
        ([0, 5, 8], [0, 4, 12], r"cu_seqlens_q is \[0, 5, 8\], and cu_seqlens_q_padded is \[0, 4, 12\]; give both"),
        ([0, 3, 8, 8], [0, 4, 12], "for the same documents"),
        ([0, 3, 8], None, "cu_seqlens_q ends at 8, but the sequence has 1 x 12 tokens; give cu_seqlens_q_padded"),
        ([0, 3, 7], [0, 4, 8], "cu_seqlens_q_padded ends at 8"),
        ([[0, 4, 12]], None, "1-D"),
    ),
    ids=str,
)
def test_other_cu_seqlens_are_refused(real, padded, words):
    with pytest.raises(ContractError, match=words):
        call(params(real, padded))


def test_keys_of_another_sequence_are_refused():
    for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
        packed = params([0, 3, 8], [0, 4, 12])
        setattr(packed, name, torch.tensor([0, 2, 9]))
        with pytest.raises(ContractError, match=rf"{name} is \[0, 2, 9\], and .*; give the same for both"):
            call(packed)
    packed = params(list(range(13)), None)
    packed.cu_seqlens_kv = torch.tensor([0, 11])
    with pytest.raises(ContractError, match=r"\[0, 1, 2, 3, 4, 5, 6, 7, ... 12\]"):
        call(packed)


def test_other_formats_are_refused():
    packed = params([0, 12], None)
    packed.qkv_format = "sbhd"
    with pytest.raises(UnsupportedError, match="qkv_format is 'sbhd'"):
        call(packed)
    cu = torch.tensor([0, 12])
    with pytest.raises(ContractError, match="cu_seqlens_q is None"):
        call(PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu))
