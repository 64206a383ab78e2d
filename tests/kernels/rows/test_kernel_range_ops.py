# SPDX-License-Identifier: Apache-2.0
"""Range gather, fill, reduce and merge against loops over ranges in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.errors import ContractError
from magi_attention.kernels import merge_ranges, range_fill_, range_gather, range_reduce

NEG = float("-inf")


def draw_ranges(rng: np.random.Generator, total: int, count: int, lengths=None) -> torch.Tensor:
    lengths = rng.integers(0, max(total // 2, 1) + 1, size=count) if lengths is None else lengths
    start = np.array([rng.integers(0, total - n + 1) for n in lengths], dtype=np.int64).reshape(-1)
    return torch.from_numpy(np.stack([start, start + lengths], axis=1).astype(np.int32).reshape(-1, 2))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(-2, 1), count=st.integers(0, 5))
def test_gather_and_fill(seed, dim, count):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((11, 11, 2))).movedim(1, 0)
    dim = dim % 2
    ranges = draw_ranges(rng, 11, count)
    parts = [x.narrow(dim, int(a), int(b - a)) for a, b in ranges]
    want = torch.cat(parts + [x.narrow(dim, 0, 0)], dim)
    total = int((ranges[:, 1] - ranges[:, 0]).sum())
    assert torch.equal(range_gather(x, ranges, dim), want)
    assert torch.equal(range_gather(x, ranges, dim, total_size=total, row_map=None), want)
    output = torch.empty_like(want)
    assert range_gather(x, ranges, dim, output=output) is output and torch.equal(output, want)
    filled = x.clone()
    for a, b in ranges:
        filled.narrow(dim, int(a), int(b - a)).fill_(3.5)
    got = x.clone()
    assert range_fill_(got, ranges, 3.5, dim) is got and torch.equal(got, filled)


def test_gather_has_a_gradient():
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    ranges = torch.tensor([[1, 4], [3, 6]])
    assert torch.autograd.gradcheck(lambda y: range_gather(y, ranges), (x,))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    op=st.sampled_from(["sum", "avg"]),
    acc=st.booleans(),
    deterministic=st.booleans(),
    dim=st.sampled_from([0, 1]),
    count=st.integers(0, 6),
)
def test_sum_and_avg(seed, op, acc, deterministic, dim, count):
    rng = np.random.default_rng(seed)
    source = draw_ranges(rng, 12, count)
    target = draw_ranges(rng, 9, count, (source[:, 1] - source[:, 0]).numpy())
    x = torch.from_numpy(rng.standard_normal((12, 3))).contiguous()
    out = torch.from_numpy(rng.standard_normal((9, 3)))
    total, hits = torch.zeros_like(out), torch.zeros(9, 1, dtype=torch.float64)
    for (a, b), (c, d) in zip(source.tolist(), target.tolist()):
        total[c:d] += x[a:b]
        hits[c:d] += 1
    want = total + out if acc else total
    want = want / (hits + acc).clamp(min=1) if op == "avg" else want
    want = torch.where(hits > 0, want, out)
    xs, got = (x, out.clone()) if dim == 0 else (x.T.contiguous(), out.T.clone())
    back = range_reduce(xs, got, source, target, dim, deterministic, op, acc_reduce=acc)
    assert back is got
    assert torch.allclose(got if dim == 0 else got.T, want, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), acc=st.booleans(), deterministic=st.booleans(), count=st.integers(0, 6))
def test_lse_merge(seed, acc, deterministic, count):
    rng = np.random.default_rng(seed)
    source = draw_ranges(rng, 12, count)
    target = draw_ranges(rng, 9, count, (source[:, 1] - source[:, 0]).numpy())
    x, out = (torch.from_numpy(rng.standard_normal((n, 2, 3))) for n in (12, 9))
    lse_x, lse_out = (torch.from_numpy(rng.standard_normal((n, 2)) * 100) for n in (12, 9))
    for lse, rows in ((lse_x, x), (lse_out, out)):
        empty = torch.from_numpy(rng.random(lse.shape) < 0.4)
        lse[empty] = NEG
        rows[empty] = float("nan")  # weight 0 must hide whatever a row without keys holds
    sources = [[(lse_out[r], out[r])] if acc else [] for r in range(9)]
    touched = set()
    for (a, b), (c, d) in zip(source.tolist(), target.tolist()):
        for i, j in zip(range(a, b), range(c, d)):
            sources[j].append((lse_x[i], x[i]))
            touched.add(j)
    got, got_lse = out.clone(), lse_out.clone()
    back = range_reduce(
        x, got, source, target, 0, deterministic, "lse", acc_reduce=acc, input_lse=lse_x, output_lse=got_lse
    )
    assert back[0] is got and back[1] is got_lse
    for r in range(9):
        if r not in touched:
            assert torch.equal(got[r].nan_to_num(7.0), out[r].nan_to_num(7.0))
            assert torch.equal(got_lse[r], lse_out[r])
            continue
        lse = torch.logsumexp(torch.stack([s for s, _ in sources[r]]), 0)
        want = sum(torch.where((s == NEG)[:, None], 0.0, (s - lse).exp()[:, None] * y) for s, y in sources[r])
        assert torch.allclose(got_lse[r], lse, atol=1e-10) and torch.allclose(got[r], want, atol=1e-10)


@pytest.mark.parametrize("op", ["sum", "avg", "lse"])
def test_deterministic_is_bitwise_and_in_order_of_the_ranges(op):
    gen = torch.Generator().manual_seed(0)
    x, lse = torch.randn(600, 4, 8, generator=gen), torch.randn(600, 4, generator=gen)
    source = torch.tensor([[i * 100, i * 100 + 100] for i in range(6)])
    target = torch.tensor([[i % 3 * 20, i % 3 * 20 + 100] for i in range(6)])

    def reduce() -> torch.Tensor:
        out, out_lse = torch.ones(140, 4, 8), torch.zeros(140, 4)
        range_reduce(x, out, source, target, 0, True, op, input_lse=lse, output_lse=out_lse)
        return torch.cat([out, out_lse[..., None]], -1)

    first = reduce()
    assert torch.equal(first, reduce())
    if op == "sum":
        want = torch.ones(140, 4, 8)
        for (a, b), (c, d) in zip(source.tolist(), target.tolist()):
            want[c:d] += x[a:b]
        assert torch.equal(first[..., :8], want)


def test_reduce_dtype_is_where_the_sum_is_formed():
    x = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    one, many = torch.tensor([[0, 1]] * 300), torch.tensor([[i, i + 1] for i in range(300)])
    out = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert range_reduce(x, out.clone(), many, one, deterministic=True).item() == 300
    low = range_reduce(x, out.clone(), many, one, deterministic=True, reduce_dtype=torch.bfloat16)
    assert low.item() == 256  # 256 + 1 is 256 in bfloat16


def test_range_op_errors():
    x, ranges = torch.zeros(4, 2), torch.tensor([[0, 2]])
    with pytest.raises(ContractError, match="give an integer tensor"):
        range_gather(x, torch.zeros(2, 3))
    with pytest.raises(ContractError, match="the ranges need"):
        range_gather(x, ranges, output=torch.zeros(3, 2))
    with pytest.raises(ContractError, match="Unknown keywords"):
        range_gather(x, ranges, colour=1)
    with pytest.raises(ContractError, match="differ in size"):
        range_reduce(x, x.clone(), ranges, torch.tensor([[0, 3]]))
    with pytest.raises(ContractError, match="as many of each"):
        range_reduce(x, x.clone(), ranges, torch.tensor([[0, 2], [2, 4]]))
    with pytest.raises(ContractError, match="needs input_lse"):
        range_reduce(x, x.clone(), ranges, ranges, reduce_op="lse")
    with pytest.raises(ContractError, match="Unknown reduce_op"):
        range_reduce(x, x.clone(), ranges, ranges, reduce_op="max")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 30))
def test_merge_ranges(seed, count):
    rng = np.random.default_rng(seed)
    outer = draw_ranges(rng, 4, count)
    inner = draw_ranges(rng, 50, count)
    types = torch.from_numpy(rng.integers(0, 4, size=count).astype(np.int32))
    merged, s_outer, s_inner, s_types, range_map, unique = merge_ranges(outer, inner, types)
    rows = [tuple(map(tuple, x)) for x in zip(outer.tolist(), inner.tolist(), [[t] for t in types.tolist()])]
    rows.sort(key=lambda r: r[0])  # stable
    assert list(zip(map(tuple, s_outer.tolist()), map(tuple, s_inner.tolist()))) == [r[:2] for r in rows]
    assert s_types.tolist() == [r[2][0] for r in rows]
    groups = sorted(set(r[0] for r in rows))
    assert unique.tolist() == [len(groups)] and unique.dtype == range_map.dtype == torch.int32
    assert list(map(tuple, merged[: len(groups)].tolist())) == groups
    assert range_map[len(groups) :].tolist() == [count] * (count + 1 - len(groups))
    for g, outer_range in enumerate(groups):
        members = s_outer[range_map[g] : range_map[g + 1]].tolist()
        assert members and all(tuple(m) == outer_range for m in members)


def test_merge_ranges_errors():
    two, three = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ContractError, match="give \\(N, 2\\)"):
        merge_ranges(two, three, None)
    with pytest.raises(ContractError, match="one type for each"):
        merge_ranges(two, two, torch.zeros(3, dtype=torch.int32))
    assert merge_ranges(two, two, None)[3] is None
