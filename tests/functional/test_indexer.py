# SPDX-License-Identifier: Apache-2.0
"""The indexer holds to matrices of all queries and keys in float64: its lists, its loss and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from magi_attention.api import index_attn_func, indexer_kl, indexer_topk, indexer_topk_blocks
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.sparse import indexer
from magi_attention.kernels.index_attn import prepare_indices, with_readers
from magi_attention.kernels.indexer import Blocks, Visible
from magi_attention.kernels.indexer.custom_ops import kl_bwd, kl_fwd, topk_blocks_op, topk_op

F64 = torch.float64
NEG_INF = float("-inf")


def all_scores(q_index, k_index, weights):
    return torch.einsum("thd,sd->ths", q_index, k_index).relu().mul(weights[..., None]).sum(1)


def draw_masks(queries, keys, gen):
    """What a caller may say about masks, and the matrix that it stands for."""
    positions = torch.randint(0, keys, (queries,), generator=gen)
    cuts = torch.randint(0, keys + 1, (2,), generator=gen).sort().values.tolist()
    cu_seqlens = [0, *cuts, keys]
    document = torch.bucketize(torch.arange(keys), torch.tensor(cu_seqlens[1:]), right=True)
    k_start = torch.randint(-2, keys, (queries,), generator=gen)
    k_end = k_start + torch.randint(-1, keys, (queries,), generator=gen)
    number = torch.arange(keys)
    chosen, matrix = {"causal": False}, torch.ones(queries, keys, dtype=torch.bool)
    for name, value, says in (
        ("causal", True, number <= positions[:, None]),
        ("cu_seqlens", cu_seqlens, document == document[positions][:, None]),
        ("k_start", k_start.int(), number >= k_start[:, None]),
        ("k_end", k_end, number < k_end[:, None]),
    ):
        if torch.rand((), generator=gen) < 0.5:
            chosen[name] = value
            matrix = matrix & says
    if chosen["causal"] or "cu_seqlens" in chosen:
        chosen["positions"] = positions
    return chosen, matrix


def visible_of(masks):
    names = {"positions": None, "cu_seqlens": None, "k_start": None, "k_end": None, **masks}
    return indexer.make_visible(**names)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    queries=st.integers(0, 20),
    keys=st.integers(1, 30),
    heads=st.integers(1, 3),
    k=st.integers(1, 40),
    rows=st.integers(1, 7),
    block=st.integers(1, 11),
    seed=st.integers(0, 10**6),
)
def test_best_keys_are_those_of_a_stable_sort(queries, keys, heads, k, rows, block, seed):
    """Small whole numbers: many scores are equal, and every sum of them is exact."""
    gen = torch.Generator().manual_seed(seed)
    shapes = (queries, heads, 2), (keys, 2), (queries, heads)
    tensors = [torch.randint(-2, 3, s, generator=gen).float() for s in shapes]
    masks, matrix = draw_masks(queries, keys, gen)
    scores = all_scores(*tensors).masked_fill(~matrix, NEG_INF)
    want = torch.full((queries, k), -1, dtype=torch.int32)
    for t, row in enumerate(scores):
        best = row.sort(descending=True, stable=True).indices[: min(k, int(matrix[t].sum()))].sort().values
        want[t, : len(best)] = best.int()
    got = indexer.indexer_topk(*tensors, k, visible_of(masks), Blocks(rows, block))
    assert got.dtype == torch.int32 and torch.equal(got, want)
    assert torch.equal(indexer_topk(*(x.double() for x in tensors), k, **masks), want)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    queries=st.integers(0, 12),
    keys=st.integers(1, 30),
    k=st.integers(1, 9),
    size=st.integers(1, 7),
    local=st.integers(0, 3),
    has_weights=st.booleans(),
    rows=st.integers(1, 7),
    block=st.integers(1, 11),
    seed=st.integers(0, 10**6),
)
def test_best_blocks_are_those_of_a_stable_sort(queries, keys, k, size, local, has_weights, rows, block, seed):
    gen = torch.Generator().manual_seed(seed)
    shapes = (queries, 3, 2), (keys, 2), (queries, 3)
    q_index, k_index, weights = (torch.randint(-2, 3, s, generator=gen).float() for s in shapes)
    masks, matrix = draw_masks(queries, keys, gen)
    if has_weights:
        scores = all_scores(q_index, k_index, weights)[:, None]
    else:
        weights, scores = None, torch.einsum("thd,sd->ths", q_index, k_index)
    of, local = (q_index, k_index, weights, k, size), min(local, k)
    lists = indexer.indexer_topk_blocks(*of, local, visible_of(masks), Blocks(rows, block))
    want = torch.full((queries, scores.shape[1], k), -1, dtype=torch.int32)
    sees = torch.zeros(queries, scores.shape[1], keys, dtype=torch.bool)  # all keys of these blocks
    for t in range(queries):
        numbers = matrix[t].nonzero()[:, 0].tolist()  # one range of keys
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        for head, row in enumerate(scores[t]):
            order = [(b < len(parts) - local, -max(float(row[s]) for s in part), b) for b, part in enumerate(parts)]
            best = [b for _, _, b in sorted(order)[:k]]
            want[t, head, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
            sees[t, head, sum((parts[b] for b in best), [])] = True
    assert torch.equal(lists.rows, want) and torch.equal(lists.counts, (want >= 0).sum(2))
    q, kv = torch.randn(queries, sees.shape[1], 4, generator=gen), torch.randn(keys, sees.shape[1], 4, generator=gen)
    probabilities = torch.einsum("thd,shd->ths", q, kv).masked_fill(~sees, NEG_INF).softmax(2).nan_to_num()
    out, _ = index_attn_func(q, kv, kv, lists, softmax_scale=1.0)
    torch.testing.assert_close(out, torch.einsum("ths,shd->thd", probabilities, kv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_lists_for_any_blocks(dtype):
    """Half of the keys are there twice, so equal scores must have equal bits wherever their blocks begin."""
    gen = torch.Generator().manual_seed(7)
    print("seed 7")
    half = torch.randn(150, 64, generator=gen).to(dtype)
    weights = torch.randn(90, 5, generator=gen)
    tensors = [torch.randn(90, 5, 64, generator=gen).to(dtype), torch.cat((half, half)), weights]
    visible = Visible(False, None, None, None, None)
    want = indexer.indexer_topk(*tensors, 33, visible, Blocks(90, 300))
    exact = all_scores(*(x.double() for x in tensors))
    threshold = exact.gather(1, want.long()).amin(1)
    assert ((exact > threshold[:, None] + 1e-5).sum(1) <= 33).all()
    assert (exact.scatter(1, want.long(), NEG_INF).amax(1) <= threshold + 1e-5).all()
    for t, row in enumerate(want.tolist()):  # of a pair the second is there with the first only
        assert all(s - 150 in row for s in row if s >= 150), t
    for rows, keys in ((1, 300), (7, 13), (64, 1), (31, 150)):
        assert torch.equal(indexer.indexer_topk(*tensors, 33, visible, Blocks(rows, keys)), want), (rows, keys)


def draw_attention(seed, queries, keys, heads, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    heads_q, heads_kv, index_heads = heads
    shapes = (queries, index_heads, 4), (keys, 4), (queries, index_heads), (queries, heads_q, 6), (keys, heads_kv, 6)
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in shapes], gen


def all_divergences(tensors, matrix, scale, softcap):
    """KL by the definition, and the lse of attention: everything over one matrix of queries and keys."""
    q_index, k_index, weights, q, k = tensors
    logits = torch.einsum("thd,shd->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits.masked_fill(~matrix, NEG_INF)
    target = logits.softmax(2).nan_to_num().sum(0)
    target = (target / target.sum(1, keepdim=True)).nan_to_num().detach()
    log_scores = all_scores(q_index, k_index, weights).masked_fill(~matrix, NEG_INF).log_softmax(1)
    divergence = target.xlogy(target) - target * log_scores.masked_fill(~matrix, 0)
    return divergence.masked_fill(~matrix, 0).sum(1), logits.logsumexp(2).t()


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    queries=st.integers(1, 14),
    keys=st.integers(1, 20),
    heads=st.sampled_from([(4, 2, 3), (3, 3, 1), (4, 1, 2)]),
    softcap=st.sampled_from([0.0, 2.0]),
    is_sparse=st.booleans(),
    rows=st.integers(1, 6),
    block=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_divergence_and_gradients_are_those_of_the_definition(
    queries, keys, heads, softcap, is_sparse, rows, block, seed
):
    tensors, gen = draw_attention(seed, queries, keys, heads)
    masks, matrix = draw_masks(queries, keys, gen)
    indices = None
    if is_sparse:
        indices = torch.randint(-keys, keys, (queries, 7), generator=gen)  # with -n, with keys twice
        masks, matrix = {"causal": True}, (indices[..., None] == torch.arange(keys)).any(1)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    want, lse = all_divergences([*leaves, *tensors[3:]], matrix, 0.5, softcap)
    grad = torch.randn(queries, generator=gen, dtype=F64)
    is_unseen = ~matrix.any(1)
    tensors[0][is_unseen] = tensors[3][is_unseen] = float("nan")  # pad rows may hold anything
    ours = [x.clone().requires_grad_() for x in tensors[:3]]
    got = indexer.indexer_kl(*ours, *tensors[3:], lse, indices, visible_of(masks), 0.5, softcap, Blocks(rows, block))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    for name, a, b in zip(
        ("q_index", "k_index", "weights"), torch.autograd.grad(got, ours, grad), torch.autograd.grad(want, leaves, grad)
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10, msg=name)


def test_heads_that_gave_their_mass_elsewhere_weigh_less():
    """Dense attention, sparse loss: of each head counts what it gave to the listed keys."""
    tensors, _ = draw_attention(5, 6, 9, (2, 1, 2))
    print("seed 5")
    everything = torch.ones(6, 9, dtype=torch.bool)
    _, lse = all_divergences(tensors, everything, 0.5, 0.0)
    indices = torch.tensor([[0, 3, 7]] * 6)
    got = indexer_kl(*tensors, lse, indices, softmax_scale=0.5)
    logits = torch.einsum("thd,shd->hts", tensors[3], tensors[4].expand(-1, 2, -1)) * 0.5
    target = logits.softmax(2).sum(0)[:, indices[0]]
    target = target / target.sum(1, keepdim=True)
    scores = all_scores(*tensors[:3])[:, indices[0]].log_softmax(1)
    torch.testing.assert_close(got, (target * (target.log() - scores)).sum(1))


@settings(max_examples=60, deadline=None, print_blob=True)
@given(keys=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_queries_stand_as_they_are_numbered(keys, seed):
    masks, _ = draw_masks(keys, keys, torch.Generator().manual_seed(seed))
    masks.pop("positions", None)
    got, want = (
        visible_of({**masks, "positions": at}).bounds(keys, keys, torch.device("cpu"))
        for at in (None, torch.arange(keys, dtype=torch.int32))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("masks, most", [({"causal": True}, 2), ({"causal": True, "cu_seqlens": [0, 3, 3, 9]}, 6)])
def test_usual_masks_take_few_operations(masks, most):
    """Each is a kernel on a GPU; views are none."""
    names = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                names.append(str(func))
            return func(*args, **(kwargs or {}))

    visible = visible_of(masks)
    with Operations():
        visible.bounds(9, 9, torch.device("cpu"))
    assert 0 < len(names) <= most, names


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("is_sparse", [False, True])
def test_no_tensor_of_all_queries_and_keys(is_sparse):
    total = 400
    tensors, _ = draw_attention(2, total, total, (1, 1, 2), dtype=torch.float32)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    visible = Visible(True, None, None, None, None)
    lse = torch.full((total, 1), 5.0)
    with Largest() as largest:
        lists = indexer.indexer_topk(*leaves, 60, visible, Blocks(16, 64))
        indexer.indexer_topk_blocks(*leaves[:2], None, 5, 8, 1, visible, Blocks(16, 64))
        given = lists if is_sparse else None
        loss = indexer.indexer_kl(*leaves, *tensors[3:], lse, given, visible, None, 0.0, Blocks(8, 32))
        loss.sum().backward()
    assert 0 < largest.elements <= total * 60 < total * total // 2


def test_low_precision_and_lists_of_the_indexer_go_together():
    tensors, _ = draw_attention(9, 50, 50, (4, 1, 2), dtype=torch.bfloat16)
    print("seed 9")
    leaves = [x.requires_grad_() for x in tensors[:3]]
    indices = indexer_topk(*leaves, 8, cu_seqlens=[0, 20, 50])
    assert not indices.requires_grad and int(indices[20:].where(indices[20:] >= 0, 20).min()) == 20
    _, meta = index_attn_func(*tensors[3:], tensors[4], indices[:, None])

    def run():
        loss = indexer_kl(*leaves, *tensors[3:], meta.lse, indices)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]

    runs = run(), run()
    with torch.autocast("cpu", torch.bfloat16):
        runs += (run(),)
    assert runs[0][0].dtype == torch.float32 and all(x.dtype == torch.bfloat16 for x in runs[0][1:])
    for other in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(runs[0], other))
    exact = [x.detach().double().requires_grad_() for x in tensors]
    matrix = (indices[..., None] == torch.arange(50)).any(1)
    want, _ = all_divergences(exact, matrix, 6**-0.5, 0.0)
    torch.testing.assert_close(runs[0][0].double(), want.detach(), atol=1e-4, rtol=1e-4)
    for a, b in zip(runs[0][1:], torch.autograd.grad(want.sum(), exact[:3])):
        torch.testing.assert_close(a.double(), b, atol=1e-2, rtol=1e-2)


def draw_documents():
    tensors, gen = draw_attention(4, 12, 12, (2, 1, 2), dtype=torch.float32)
    print("seed 4")
    cu_seqlens = torch.tensor([0, 5, 12])
    return tensors, {"cu_seqlens": cu_seqlens, "positions": torch.arange(12, dtype=torch.int32)}, gen


def test_blocks_for_deterministic_attention_are_inverted():
    tensors, masks, _ = draw_documents()
    plain, lists = (indexer_topk_blocks(*tensors[:3], 2, 3, **masks, deterministic=x) for x in (False, True))
    want = with_readers(plain)
    assert plain.readers is None and torch.equal(lists.readers, want.readers)
    assert torch.equal(lists.reader_begins, want.reader_begins)


def test_compiled_whole_each_call_is_an_op():
    tensors, masks, _ = draw_documents()
    leaves = [x.requires_grad_() for x in tensors[:3]]

    def layer(q_index, k_index, weights, q, k, lse):
        lists = indexer_topk(q_index, k_index, weights, 4, **masks)
        sparse = indexer_kl(q_index, k_index, weights, q, k, lse, lists)
        dense = indexer_kl(q_index, k_index, weights, q, k, lse, cu_seqlens=[0, 5, 12])
        blocks = indexer_topk_blocks(q_index, k_index, weights, 2, 3, **masks)
        return sparse + 2 * dense, torch.cat((lists, blocks.rows[:, 0]), 1)

    lse = torch.full((12, 2), 2.0)
    want, lists = layer(*tensors, lse)
    grads = torch.autograd.grad(want.sum(), leaves)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(*tensors, lse)[1], lists)
    names = [str(node.target) for node in graphs[0].graph.nodes if "magi_attention" in str(node.target)]
    wanted = "indexer_topk", "index_prepare", "indexer_kl_fwd", "indexer_kl_fwd", "indexer_topk_blocks"
    assert names == [f"magi_attention.{name}.default" for name in wanted]
    for dynamic in (False, True):
        torch._dynamo.reset()
        out, chosen = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*tensors, lse)
        assert torch.equal(out, want) and torch.equal(chosen, lists)
        for a, b in zip(torch.autograd.grad(out.sum(), leaves), grads):
            assert torch.equal(a, b)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_ops_are_registered_soundly(is_sparse):
    tensors, masks, gen = draw_documents()
    visible = visible_of({"causal": True, **masks})
    of = [x.detach() for x in tensors[:3]]
    torch.library.opcheck(topk_op, (*of, 4, *visible, 5, 8), test_utils=("test_schema", "test_faketensor"))
    weights = of[2] if is_sparse else None
    by_blocks = of[0], of[1], weights, 2, 3, 1, *visible, 5, 8
    torch.library.opcheck(topk_blocks_op, by_blocks, test_utils=("test_schema", "test_faketensor"))
    lists = torch.randint(-2, 12, (12, 4), generator=gen) if is_sparse else None
    given = (None,) * 4
    if lists is not None:
        prepared = prepare_indices(lists[:, None], 12, deterministic=True)
        given = prepared.rows[:, 0], prepared.counts[:, 0], prepared.readers, prepared.reader_begins
    rest = *tensors[3:], torch.full((12, 2), 2.0), *given, *visible, 0.5, 0.0, 5, 8
    torch.library.opcheck(kl_fwd, (*[x.requires_grad_() for x in tensors[:3]], *rest))
    loss, *saved = kl_fwd(*of, *rest)
    torch.library.opcheck(
        kl_bwd, (torch.ones_like(loss), *saved, *of, *rest), test_utils=("test_schema", "test_faketensor")
    )


def test_what_is_refused():
    (q_index, k_index, weights, q, k), _ = draw_attention(1, 5, 8, (2, 1, 3))
    of, lse, lists = (q_index, k_index, weights), torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int64)
    for call, words in (
        (lambda: indexer_topk(*of, 3), "5 queries for 8 keys.*give positions="),
        (lambda: indexer_topk(q_index, k_index, None, 3), "weights is a NoneType; give floating"),
        (lambda: indexer_topk_blocks(*of, 3, 2, local_blocks=4, causal=False), "local_blocks is 4 and k is 3"),
        (lambda: indexer_topk_blocks(*of, 3, 0, causal=False), "k_block_size is 0"),
        (lambda: indexer_topk_blocks(q_index, k_index[:, :2], None, 3, 2), "need one index dim"),
        (lambda: indexer_topk(*of, 0, causal=False), "k is 0; give an integer of at least 1"),
        (lambda: indexer_topk(q_index[0], k_index, weights, 3), "q_index is .*give floating tensors"),
        (lambda: indexer_topk(q_index, k_index, weights[:, :2], 3), "each index head needs a weight"),
        (lambda: indexer_topk(q_index, k_index.float(), weights, 3), "cast both to one dtype"),
        (lambda: indexer_topk(*of, 3, causal=False, k_end=torch.zeros(4)), "k_end is .*a number for each query"),
        (lambda: indexer_topk(*of, 3, cu_seqlens=[0, 7], positions=lists[:, 0]), "ascend from 0 to the 8 keys"),
        (lambda: indexer_topk(*of, 3, cu_seqlens=[0, 5.0], causal=False), "cu_seqlens is 5.0 .*give an integer"),
        (lambda: indexer_topk(*of, 3, cu_seqlens=8, positions=lists[:, 0]), "cu_seqlens is 8; give integers"),
        (lambda: indexer_topk(*of, 3, cu_seqlens=torch.zeros(2), causal=False), "cu_seqlens is torch.float32"),
        (lambda: indexer_kl(*of, q, k, lse[:, :1], lists), r"lse is \(queries, heads\)"),
        (lambda: indexer_kl(*of, q, k, None, lists), "lse is a NoneType; give meta.lse"),
        (lambda: indexer_kl(*of, q, k, lse, lists + 8), "index is .*, but k has only 8 rows"),
        (lambda: indexer_kl(*of, q, k, lse, lists.float()), "give an int32 or int64 tensor"),
        (lambda: indexer_kl(*of, q, k, lse, lists, k_start=lists[:, 0]), "leave out positions"),
    ):
        with pytest.raises(ContractError, match=words):
            call()
    leaf = k_index.clone().requires_grad_()
    (grad,) = torch.autograd.grad(indexer_kl(q_index, leaf, weights, q, k, lse, lists).sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        grad.sum().backward()
