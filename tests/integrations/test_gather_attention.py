# SPDX-License-Identifier: Apache-2.0
"""``gather_attn`` beside a matrix in float64, and beside attn_gym's own reference where that is installed."""

from types import SimpleNamespace

import pytest
import torch

from magi_attention.errors import ContractError
from magi_attention.integrations.gather_attention import gather_attn


def random_call(seed: int, is_shared: bool, has_sink: bool, lengths: list[int] | None, dtype=torch.float64) -> tuple:
    """(tensors that want gradients, the others by name). With ``lengths`` documents are packed, and a token is left."""
    gen = torch.Generator().manual_seed(seed)
    print(f"seed {seed}")
    batch, tokens, pool = (2, 19, 7) if lengths is None else (1, sum(lengths) + 1, sum(n // 2 for n in lengths) + 2)
    kv_heads = 1 if is_shared else 4
    shapes = (batch, 4, tokens, 16), (batch, kv_heads, tokens, 16), (batch, kv_heads, pool, 16), (4,)
    tensors = [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]
    most = pool if lengths is None else max(n // 2 for n in lengths) + 1
    scores = torch.rand(batch, tokens, most, generator=gen)
    indices = scores.argsort(-1)[..., : min(3, most)]  # none twice; some beyond the document's rows
    indices = indices.where(torch.rand(indices.shape, generator=gen) < 0.8, -1)
    options = dict(sliding_window_size=5, scale=0.4)
    if lengths is not None:
        rows = [n // 2 for n in lengths]
        for name, of in (("cu_seqlens", lengths), ("cu_seqlens_k", rows)):
            options[name] = torch.tensor([0, *torch.tensor(of).cumsum(0).tolist()], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (tensors if has_sink else tensors[:3])]
    return leaves, indices, options


def by_matrix(
    query, local_kv, sparse_kv, indices, sink=None, *, sliding_window_size, scale, cu_seqlens=None, cu_seqlens_k=None
):
    """(out, lse) by a mask over all pairs."""
    batch, heads, tokens, _ = query.shape
    pool = sparse_kv.shape[2]
    sees = torch.zeros(batch, tokens, tokens + pool, dtype=torch.bool)
    for b in range(batch):
        for t in range(tokens):
            begin, first, last = 0, 0, pool
            if cu_seqlens is not None:
                d = sum(end <= t for end in cu_seqlens[1:].tolist())
                ends = [*cu_seqlens_k.tolist(), int(cu_seqlens_k[-1])]
                begin, first, last = int(cu_seqlens[d]), ends[d], ends[d + 1]
            sees[b, t, max(begin, t - sliding_window_size + 1) : t + 1] = True
            for i in indices[b, t].tolist():
                if 0 <= i < last - first:
                    sees[b, t, tokens + first + i] = True
    kv = torch.cat((local_kv, sparse_kv), 2).expand(-1, heads, -1, -1)
    logits = (query @ kv.transpose(2, 3) * scale).masked_fill(~sees[:, None], float("-inf"))
    extra = torch.full((heads,), float("-inf"), dtype=logits.dtype) if sink is None else sink
    logits = torch.cat((logits, extra[None, :, None, None].expand(batch, -1, tokens, -1)), 3)
    return logits.softmax(3)[..., :-1] @ kv, logits.logsumexp(3)


@pytest.mark.parametrize("lengths", (None, [9, 1, 4], [2, 0, 12]))
@pytest.mark.parametrize("is_shared, has_sink", ((True, True), (True, False), (False, True)))
@pytest.mark.parametrize("seed", range(2))
def test_out_lse_and_gradients(seed, is_shared, has_sink, lengths):
    leaves, indices, options = random_call(seed, is_shared, has_sink, lengths)
    tensors = leaves[:3], leaves[3:]
    out, aux = gather_attn(*tensors[0], indices, *tensors[1], return_aux=SimpleNamespace(lse=True), **options)
    want, lse = by_matrix(*tensors[0], indices, *tensors[1], **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, lse)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    for got, of in zip(torch.autograd.grad(out, leaves, up), torch.autograd.grad(want, leaves, up)):
        torch.testing.assert_close(got, of)


@pytest.mark.parametrize("lengths", (None, [9, 1, 4]))
@pytest.mark.parametrize("is_shared", (True, False))
def test_as_attn_gym_computes_it(is_shared, lengths):
    sparse = pytest.importorskip("attn_gym.sparse.gather_attn", reason="needs attn-gym; ci/integrations installs it")
    leaves, indices, options = random_call(7, is_shared, True, lengths)
    out, aux = gather_attn(*leaves[:3], indices, leaves[3], return_aux=sparse.AuxRequest(lse=True), **options)
    want, of = sparse.gather_attn(
        *leaves[:3], indices, leaves[3], impl="reference", return_aux=sparse.AuxRequest(lse=True), **options
    )
    kept = slice(None) if lengths is None else slice(0, sum(lengths))  # behind the documents all is undefined there
    torch.testing.assert_close(out[:, :, kept], want[:, :, kept])
    torch.testing.assert_close(aux.lse[:, :, kept], of.lse[:, :, kept])
    grads = [torch.autograd.grad(x[:, :, kept].square().sum(), leaves) for x in (out, want)]
    for got, other in zip(*grads):
        torch.testing.assert_close(got, other)


@pytest.mark.parametrize(
    "edit, sentence",
    (
        (dict(impl="reference"), "leave both out"),
        (dict(kernel_options={"backend": "triton"}), "leave both out"),
        (dict(sliding_window_size=-1), "0 or more"),
        (dict(cu_seqlens=torch.zeros(2, dtype=torch.int32)), "both or neither"),
    ),
)
def test_what_it_does_not_take(edit, sentence):
    leaves, indices, options = random_call(0, True, False, None)
    with pytest.raises(ContractError, match=sentence):
        gather_attn(*leaves, indices, **{**options, **edit})
    with pytest.raises(ContractError, match="as many heads"):
        gather_attn(leaves[0], leaves[1][..., :8], leaves[2], indices)
    with pytest.raises(ContractError, match="give integers"):
        gather_attn(*leaves, indices.float())
