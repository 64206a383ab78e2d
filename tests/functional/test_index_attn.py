# SPDX-License-Identifier: Apache-2.0
"""Index attention against a masked softmax in float64, with all options, and against poison in what nobody lists."""

from __future__ import annotations

import pytest
import torch
from oracle import dense_attention

from magi_attention.api import flex_flash_attn_func, index_attn_func, prepare_indices
from magi_attention.errors import ContractError
from magi_attention.kernels.index_attn import reference
from magi_attention.kernels.index_attn.custom_ops import index_bwd, index_fwd

NEG_INF = float("-inf")
# Tq, Tk, Hq, Hk, D, Dv, N
SIZES = [(7, 9, 4, 2, 8, 8, 5), (5, 3, 3, 3, 5, 4, 6), (6, 20, 8, 1, 16, 12, 11), (3, 1, 2, 1, 4, 4, 2)]


def draw(sizes, seed):
    """Leaves q, k, v in float64 and int32 lists with duplicates, -1 anywhere and empty rows."""
    tq, tk, hq, hk, dim, dim_v, width = sizes
    gen = torch.Generator().manual_seed(seed)
    shapes = (tq, hq, dim), (tk, hk, dim), (tk, hk, dim_v)
    leaves = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    indices = torch.randint(-tk // 2, tk, (tq, hk, width), generator=gen, dtype=torch.int32)
    indices[torch.rand(tq, generator=gen) < 0.3] = -1
    return leaves, indices


def allowed_by(indices, total_k, block=1, start=None, end=None):
    """(Hk, Tq, Tk) from the definition, pair by pair."""
    tokens, heads, _ = indices.shape
    allowed = torch.zeros(heads, tokens, total_k, dtype=torch.bool)
    for t in range(tokens):
        first, last = 0 if start is None else int(start[t]), total_k if end is None else int(end[t])
        for h in range(heads):
            for entry in indices[t, h].tolist():
                if entry >= 0:
                    allowed[h, t, first + entry * block : min(first + (entry + 1) * block, last)] = True
    return allowed


@pytest.mark.parametrize("has_v", (True, False))
@pytest.mark.parametrize("case", range(12))
def test_every_option_is_as_in_a_dense_softmax(case, has_v, monkeypatch):
    """Values of their own, or columns of the keys, whose gradient is then in that of the keys."""
    sizes, seed = SIZES[case % len(SIZES)], 100 + case + 200 * (not has_v)
    print(f"seed {seed}")
    monkeypatch.setattr(reference, "BUDGET", 300)  # a few queries at a time
    (q, k, v), indices = draw(sizes, seed)
    width, gen = max(sizes[5] - case % 3, 1), torch.Generator().manual_seed(seed)
    inputs, values = ([q, k, v], v) if has_v else ([q, k], k[..., :width])
    sink = None
    if case % 3:
        shape = (2, sizes[2]) if case % 3 == 1 else (sizes[0], 3, sizes[2])
        sink = torch.randn(shape, dtype=torch.float64, generator=gen).requires_grad_()
        inputs.append(sink)
    options = dict(scale=0.7 if case % 2 else None, softcap=1.5 if case >= 6 else 0.0, sink=sink)
    want, lse, logits = dense_attention(q, k, values, allowed_by(indices, sizes[1]), **options)
    options["softmax_scale"] = options.pop("scale")
    options |= {} if has_v else {"head_dim_v": width}
    out, meta = index_attn_func(
        q, k, v if has_v else None, indices.long() if case % 2 else indices, return_max_logits=True,
        deterministic=bool(case % 2), sink_layout="ssh" if case % 3 == 2 else "sh", **options,
    )  # fmt: skip
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(meta.lse, lse.detach())
    torch.testing.assert_close(meta.max_logits, logits.detach().amax((1, 2)))
    assert meta.lse.requires_grad and not meta.max_logits.requires_grad
    dout = torch.randn(out.shape, dtype=out.dtype, generator=gen)
    for got, wanted in zip(*(torch.autograd.grad(x, inputs, dout) for x in (out, want))):
        torch.testing.assert_close(got, wanted)


def test_lists_of_blocks_between_bounds():
    leaves, _ = draw((6, 21, 4, 2, 8, 8, 1), 5)
    gen = torch.Generator().manual_seed(5)
    indices = torch.randint(-1, 3, (6, 2, 4), generator=gen)
    start, end = torch.tensor([0, 0, 3, 5, 5, 6]), torch.tensor([21, 4, 14, 5, 21, 0])
    for bounds in ({}, dict(k_start=start), dict(k_end=end), dict(k_start=start, k_end=end)):
        lists = prepare_indices(indices, 21, k_block_size=6, **bounds)
        allowed = allowed_by(indices, 21, 6, bounds.get("k_start"), bounds.get("k_end"))
        results = index_attn_func(*leaves, lists)[0], dense_attention(*leaves, allowed)[0]
        torch.testing.assert_close(*results)
        for pair in zip(*(torch.autograd.grad(x.sum(), leaves) for x in results)):
            torch.testing.assert_close(*pair)


def test_layers_share_prepared_lists():
    leaves, indices = draw(SIZES[0], 3)
    lists = prepare_indices(indices, 9)
    assert torch.equal(index_attn_func(*leaves, lists)[0], index_attn_func(*leaves, indices)[0])
    with pytest.raises(ContractError, match=r"\(7, 2\) for \(lists, kv heads\) and 9 keys, but q and k ask for"):
        index_attn_func(leaves[0][:6], *leaves[1:], lists)
    with pytest.raises(ContractError, match="give integers .7 queries, 2 kv heads, keys."):
        index_attn_func(*leaves, indices[:, :1])


def attend(leaves, indices, width, **options):
    """``leaves`` without values: these are the first ``width`` columns of the keys."""
    v, options = (leaves[2], options) if len(leaves) == 3 else (None, {"head_dim_v": width, **options})
    return index_attn_func(*leaves[:2], v, indices, **options)


@pytest.mark.parametrize("given", (3, 2), ids=["values", "columns"])
def test_poison_in_what_nobody_sees_stays_there(given):
    leaves, indices = draw(SIZES[0], 8)
    indices[indices == 0] = 1  # row 0 stands for what is not seen
    indices[2] = -1
    want = attend(leaves[:given], indices, 5)
    dout = torch.ones_like(want[0])
    wanted = torch.autograd.grad(want[0], leaves[:given], dout)
    unseen = ~allowed_by(indices, 9).any(1)  # (Hk, Tk)
    q, k, v = poisoned = [x.detach().clone() for x in leaves]
    q[2], k[unseen.t()], v[unseen.t()] = (float("nan"),) * 3
    poisoned = [x.requires_grad_() for x in poisoned[:given]]
    out, meta = attend(poisoned, indices, 5)
    dout[2] = float("nan")
    assert unseen[:, 0].all() and torch.equal(out, want[0]) and torch.equal(meta.lse, want[1].lse)
    assert (out[2] == 0).all() and (meta.lse[2] == NEG_INF).all()
    for got, grad in zip(torch.autograd.grad(out, poisoned, dout), wanted):
        assert torch.equal(got, grad)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_same_bits_again_and_for_any_order_of_a_list(dtype):
    leaves, indices = draw((33, 50, 8, 2, 32, 16, 24), 4)
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want = dense_attention(*(x.double() for x in leaves), allowed_by(indices, 50))[0]
    runs = []
    for lists in (indices, indices, indices.flip(-1)):
        out, meta = index_attn_func(*leaves, lists, deterministic=True)
        runs.append([out, meta.lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
    assert runs[0][0].dtype == dtype and runs[0][1].dtype == torch.float32
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(runs[0][0].double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("given", (3, 2), ids=["values", "columns"])
@pytest.mark.parametrize(
    "sizes", [(0, 4, 2, 1, 4, 3, 3), (3, 0, 2, 1, 4, 3, 2), (3, 4, 2, 1, 4, 3, 0), (3, 4, 2, 1, 4, 3, 2)], ids=str
)
def test_nothing_to_see_gives_zeros(sizes, given):
    leaves, _ = draw((*sizes[:1], max(sizes[1], 1), *sizes[2:]), 0)
    leaves = [leaves[0], *(x.detach()[: sizes[1]].requires_grad_() for x in leaves[1:given])]
    out, meta = attend(leaves, torch.full((sizes[0], 1, sizes[6]), -1), 3, return_max_logits=True)
    assert out.shape == (sizes[0], 2, 3) and (out == 0).all()
    assert (meta.lse == NEG_INF).all() and (meta.max_logits == NEG_INF).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("has_v", (True, False))
def test_compiled_it_is_one_op_and_one_that_prepares(has_v):
    (q, k, v), indices = draw(SIZES[2], 6)
    v, options, graphs = (v, {}, []) if has_v else (None, {"head_dim_v": 12}, [])

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v, indices):
        return index_attn_func(q, k, v, indices, **options)[0] * 2

    want, inputs = layer(q, k, v, indices), (q, k, v) if has_v else (q, k)
    wanted = torch.autograd.grad(want.sum(), inputs)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(q, k, v, indices), want)
    names = [str(node.target) for node in graphs[0].graph.nodes if "magi_attention" in str(node.target)]
    assert names == ["magi_attention.index_prepare.default", "magi_attention.index_fwd.default"]
    for dynamic in (False, True):
        torch._dynamo.reset()
        out = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, k, v, indices)
        assert torch.equal(out, want)
        assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(out.sum(), inputs), wanted))


@pytest.mark.parametrize("has_v", (True, False))
def test_ops_are_registered_soundly(has_v):
    (q, k, v), indices = draw(SIZES[0], 1)
    lists = prepare_indices(indices, 9, deterministic=has_v)
    v, width = (v, 8) if has_v else (None, 5)
    mask = width, *lists.operands
    sink = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for extra, top in ((None, False), (sink, True)):
        torch.library.opcheck(index_fwd, (q, k, v, *mask, extra, "sh", 0.3, 0.0, False, 0, top, True))
        out, lse, _ = index_fwd(q, k, v, *mask, extra, "sh", 0.3, 0.0, False, 0, top, True)
        dlse = torch.ones_like(lse) if top else None
        back = [None if x is None else x.detach() for x in (torch.ones_like(out), q, k, v)]
        back += [width, out.detach(), lse.detach()]
        extra = None if extra is None else extra.detach()
        torch.library.opcheck(
            index_bwd,
            (*back, *mask[1:], extra, "sh", 0.3, 0.0, False, 0, dlse),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_values_are_given_in_one_way():
    (q, k, v), indices = draw(SIZES[0], 2)
    for values, options, words in (
        (v, dict(head_dim_v=8), "give one of the two"),
        (None, {}, "v is None: give head_dim_v"),
        (None, dict(head_dim_v=9), "head_dim_v is 9, and k has only 8 columns"),
        (None, dict(head_dim_v=0), "head_dim_v is 0; give an integer of at least 1"),
        (None, dict(head_dim_v=4.0), "head_dim_v is 4.0"),
    ):
        with pytest.raises(ContractError, match=words):
            index_attn_func(q, k, values, indices, **options)
    with pytest.raises(ContractError, match="q and k must have the same head dim"):
        index_attn_func(q, k[..., :7], None, indices, head_dim_v=4)


def test_published_spellings_say_the_same():
    leaves, indices = draw(SIZES[0], 9)
    q, k, v = leaves
    options = dict(softmax_scale=0.3, softcap=2.0)
    want, meta = index_attn_func(*leaves, indices, **options)
    newer, newer_meta = flex_flash_attn_func(
        *leaves, index_sparse_indices=indices, index_sparse=True, block_sparse=True, pack_gqa=True, **options
    )
    assert torch.equal(newer, want) and torch.equal(newer_meta.lse, meta.lse)
    # physical rows of 1.1.x: kv head h of token t is row t * Hk + h of k
    physical = torch.where(indices < 0, indices, indices * 2 + torch.arange(2, dtype=torch.int32)[:, None])
    older, _ = flex_flash_attn_func(
        q.reshape(14, 2, 8), k.reshape(18, 1, 8), v.reshape(18, 1, 8), index_attn_indices=physical, index_attn=True,
        **options,
    )  # fmt: skip
    assert torch.equal(older.reshape(want.shape), want)
    blocks = torch.where(indices < 0, indices, indices // 4)
    by_blocks, _ = flex_flash_attn_func(*leaves, index_sparse_indices=blocks, sparse_k_block_size=4)
    torch.testing.assert_close(by_blocks, dense_attention(*leaves, allowed_by(blocks, 9, 4))[0])
    spelled = torch.compile(
        lambda q, k, v, lists: flex_flash_attn_func(q, k, v, index_sparse_indices=lists, sparse_k_block_size=4)[0],
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    assert torch.equal(spelled(*leaves, blocks), by_blocks)
    ranges = torch.tensor([[0, 4]])
    with pytest.raises(ContractError, match="index_sparse_indices and q_ranges and k_ranges exclude each other"):
        flex_flash_attn_func(*leaves, ranges, ranges, index_sparse_indices=indices)
