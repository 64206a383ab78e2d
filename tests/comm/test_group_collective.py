# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from comm_oracle import cast_rows, contributions, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.transport.base import SingleTransport, as_bytes
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError

few = settings(max_examples=40, deadline=None, print_blob=True)
seeds = st.integers(0, 2**32 - 1)
worlds = st.integers(1, 8)


def rand(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs_of(plan, seed, *shape):
    return [rand(seed + r, s.input_rows, *shape) for r, s in enumerate(plan.specs)]


def partials_of(plan, seed, *shape):
    return [rand(seed + 100 + r, s.output_rows, *shape) for r, s in enumerate(plan.specs)]


@few
@given(seeds, worlds, st.booleans())
def test_cast_matches_brute_force(seed, world, async_op):
    plan = random_plan(seed, world)
    xs = inputs_of(plan, seed % 1000, 3, 2)

    def main(t):
        out = torch.full((plan.specs[t.rank].output_rows, 3, 2), torch.nan, dtype=torch.float64)
        work = group_cast(xs[t.rank], out, *plan.lists(t.rank), t, async_op=async_op)
        return work.wait_post_process().numpy()

    for r, got in enumerate(FakeWorld(world).run(main)):
        np.testing.assert_array_equal(got, cast_rows(plan, [x.numpy() for x in xs], r))


@few
@given(seeds, worlds, st.sampled_from(["sum", "avg"]), st.booleans())
def test_reduce_matches_brute_force(seed, world, op, acc_reduce):
    plan = random_plan(seed, world)
    parts = partials_of(plan, seed % 1000, 2)
    prior = inputs_of(plan, seed % 1000, 2)

    def main(t):
        out = prior[t.rank].clone() if acc_reduce else torch.full_like(prior[t.rank], torch.nan)
        work = group_reduce(parts[t.rank], out, *plan.reduce_lists(t.rank), t, reduce_op=op, acc_reduce=acc_reduce)
        return work.wait_post_process().numpy()

    for r, got in enumerate(FakeWorld(world).run(main)):
        for i, terms in enumerate(contributions(plan, [p.numpy() for p in parts], r)):
            terms = [prior[r][i].numpy()] * acc_reduce + terms
            want = sum(terms, np.zeros(2))
            if op == "avg" and terms:
                want = want / len(terms)
            np.testing.assert_allclose(got[i], want, rtol=0, atol=1e-14)


def lse_terms(plan, outs, lses, rank):
    return zip(contributions(plan, outs, rank), contributions(plan, lses, rank))


@few
@given(seeds, st.integers(1, 5), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_lse_reduce_matches_brute_force(seed, world, acc_reduce, lse_dtype):
    plan = random_plan(seed, world)
    rng = np.random.default_rng(seed)
    heads = 2

    def make(rows):
        out, lse = rng.standard_normal((rows, heads, 3)), 5 * rng.standard_normal((rows, heads))
        empty = rng.random((rows, heads)) < 0.3
        lse[empty], out[empty] = -np.inf, np.nan  # what a row without keys holds must not matter
        return out, lse

    parts = [make(s.output_rows) for s in plan.specs]
    prior = [make(s.input_rows) for s in plan.specs]

    def main(t):
        out, lse = (torch.tensor(v) for v in prior[t.rank])
        lse = lse.to(lse_dtype)
        if not acc_reduce:
            out.fill_(torch.nan), lse.fill_(torch.nan)
        in_out, in_lse = (torch.tensor(v) for v in parts[t.rank])
        work = group_reduce(
            in_out,
            out,
            *plan.reduce_lists(t.rank),
            t,
            reduce_op="lse",
            acc_reduce=acc_reduce,
            input_lse=in_lse.to(lse_dtype),
            output_lse=lse,
        )
        got = work.wait_post_process()
        assert got[0] is out and got[1] is lse
        return out.numpy(), lse.double().numpy()

    tol = 1e-12 if lse_dtype == torch.float64 else 2e-5
    outs, lses = zip(*parts)
    for r, (got_out, got_lse) in enumerate(FakeWorld(world).run(main)):
        for i, (os, ls) in enumerate(lse_terms(plan, outs, lses, r)):
            if acc_reduce:
                os, ls = [prior[r][0][i], *os], [prior[r][1][i], *ls]
            for h in range(heads):
                pairs = [(o[h], v[h]) for o, v in zip(os, ls) if v[h] > -np.inf]
                want_lse = np.logaddexp.reduce([v for _, v in pairs]) if pairs else -np.inf
                want = sum((np.exp(v - want_lse) * o for o, v in pairs), np.zeros(3))
                np.testing.assert_allclose(got_lse[i, h], want_lse, rtol=tol, atol=tol)
                np.testing.assert_allclose(got_out[i, h], want, rtol=0, atol=10 * tol)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]
    + [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64],
)
def test_cast_moves_every_dtype(dtype):
    plan = random_plan(7, 4, max_splits=6)
    numbers = [torch.arange(s.input_rows * 3).view(-1, 3) % 7 + r for r, s in enumerate(plan.specs)]

    def main(t):
        out = torch.zeros(plan.specs[t.rank].output_rows, 3, dtype=dtype)
        group_cast(numbers[t.rank].to(dtype), out, *plan.lists(t.rank), t).wait_post_process()
        return out

    for r, got in enumerate(FakeWorld(4).run(main)):
        want = torch.from_numpy(cast_rows(plan, [x.numpy() for x in numbers], r)).to(dtype)
        assert torch.equal(as_bytes(got), as_bytes(want.contiguous()))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float64)])
def test_several_tensors_share_one_message(dtypes):
    plan = random_plan(3, 4, max_splits=6)
    ks, vs = inputs_of(plan, 1, 2, 3), inputs_of(plan, 50, 5)
    messages = []

    def main(t):
        spec = plan.specs[t.rank]
        x = [ks[t.rank].to(dtypes[0]), vs[t.rank].to(dtypes[1])]
        y = [torch.zeros(spec.output_rows, *a.shape[1:], dtype=a.dtype) for a in x]
        before = t._num_ops
        assert group_cast(x, y, *plan.lists(t.rank), t).wait_post_process() is y
        messages.append(t._num_ops - before)
        back = [torch.zeros_like(a) for a in x]
        group_reduce(y, back, *plan.reduce_lists(t.rank), t).wait_post_process()
        fanout = torch.from_numpy(A2AVLayout.from_spec(spec)._num_contributions)
        for a, b in zip(x, back):
            times = fanout.view(-1, *[1] * (a.ndim - 1))
            torch.testing.assert_close(b.double(), a.double() * times, rtol=8e-3, atol=0)
        return [a.double() for a in y]

    for r, got in enumerate(FakeWorld(4).run(main)):
        for y, xs, dtype in zip(got, (ks, vs), dtypes):
            want = cast_rows(plan, [a.to(dtype).double().numpy() for a in xs], r)
            np.testing.assert_array_equal(y.numpy(), want)
    assert messages == [1] * 4


def test_cast_with_lse():
    plan = random_plan(5, 3, max_splits=5)
    xs, lses = inputs_of(plan, 1, 2, 3), inputs_of(plan, 9, 2)

    def main(t):
        rows = plan.specs[t.rank].output_rows
        out, lse = torch.zeros(rows, 2, 3, dtype=torch.bfloat16), torch.zeros(rows, 2)
        x = xs[t.rank].to(torch.bfloat16)
        in_lse = lses[t.rank].float()
        work = group_cast(
            x, out, *plan.lists(t.rank), t, cast_lse=True, input_lse=in_lse, output_lse=lse, async_op=True
        )
        got = work.wait_post_process(out, lse)
        assert got[0] is out and got[1] is lse
        return out.float(), lse

    for r, (out, lse) in enumerate(FakeWorld(3).run(main)):
        np.testing.assert_array_equal(lse, cast_rows(plan, [v.float().numpy() for v in lses], r))
        want = cast_rows(plan, [v.to(torch.bfloat16).float().numpy() for v in xs], r)
        np.testing.assert_array_equal(out, want)


def one_row_from_each(world):
    """Rank 0 has one row, all others reduce into it."""
    src = list(range(1, world))
    return lambda r: ([], [1], [], [src]) if r == 0 else ([1], [], [0], [])


def test_16_bit_sums_are_added_in_float32():
    world = 5
    lists = one_row_from_each(world)

    def main(t):
        x = torch.full((0 if t.rank == 0 else 1, 1), 1.0, dtype=torch.bfloat16)
        out = torch.full((1 if t.rank == 0 else 0, 1), 256.0, dtype=torch.bfloat16)
        return group_reduce(x, out, *lists(t.rank), t).wait_post_process().float().tolist()

    # in bf16 256 + 1 = 256, four times over; in float32 the sum is 260
    assert FakeWorld(world).run(main)[0] == [[260.0]]


def test_comm_dtype_is_used_on_the_wire_only():
    lists = one_row_from_each(2)

    def main(t):
        x = torch.full((t.rank, 1), 1 + 2.0**-12)
        out = torch.full((1 - t.rank, 1), 2.0**-14)
        work = group_reduce(x, out, *lists(t.rank), t, comm_dtype=torch.bfloat16)
        return work.wait_post_process().tolist()

    assert FakeWorld(2).run(main)[0] == [[1 + 2.0**-14]]


def test_reduce_gives_the_same_bits_whatever_the_timing():
    plan = random_plan(11, 6, max_splits=6)
    parts = [p.float() * 10.0 ** (3 * r) for r, p in enumerate(partials_of(plan, 1, 8))]

    def main(t, slow):
        if t.rank == slow:
            torch.randn(400, 400).matmul(torch.randn(400, 400))
        out = torch.zeros(plan.specs[t.rank].input_rows, 8)
        return group_reduce(parts[t.rank], out, *plan.reduce_lists(t.rank), t).wait_post_process()

    runs = [FakeWorld(6).run(main, slow) for slow in (0, 3, 5)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_strided_inputs_and_outputs():
    plan = random_plan(13, 4, max_splits=6)
    xs = inputs_of(plan, 4, 3, 2)

    def main(t):
        spec = plan.specs[t.rank]
        x = xs[t.rank].permute(2, 1, 0).contiguous().permute(2, 1, 0)
        base = torch.zeros(2, 3, 2 * spec.output_rows, dtype=torch.float64)
        out = base.permute(2, 1, 0)[::2]
        group_cast(x, out, *plan.lists(t.rank), t).wait_post_process()
        back = torch.zeros(2, 3, spec.input_rows, dtype=torch.float64).permute(2, 1, 0)
        group_reduce(out, back, *plan.reduce_lists(t.rank), t).wait_post_process()
        times = torch.from_numpy(A2AVLayout.from_spec(spec)._num_contributions).view(-1, 1, 1)
        torch.testing.assert_close(back, xs[t.rank] * times)
        return out.contiguous().numpy(), base.permute(2, 1, 0)[1::2].abs().sum().item()

    for r, (got, outside) in enumerate(FakeWorld(4).run(main)):
        np.testing.assert_array_equal(got, cast_rows(plan, [x.numpy() for x in xs], r))
        assert outside == 0


def test_tensor_metadata_with_tails():
    plan = random_plan(31, 3, max_splits=5)
    xs, ys = inputs_of(plan, 3, 2), partials_of(plan, 3, 2)

    def padded(lists, world):
        return torch.tensor([r + [-1] * (world - len(r)) for r in lists], dtype=torch.int64).view(-1, world)

    def main(t):
        splits, out_splits, dst, src = plan.lists(t.rank)
        rows = sum(out_splits)
        out = torch.full((rows + 2, 2), -7.0, dtype=torch.float64)
        ints = [torch.tensor(v, dtype=torch.int64) for v in (splits, out_splits + [0], src + [3])]
        dst = padded(dst, 3)
        group_cast(xs[t.rank], out, ints[0], ints[1], dst, ints[2], t).wait_post_process()
        assert (out[rows:] == -7).all()
        y = torch.cat([ys[t.rank], torch.full((2, 2), torch.nan, dtype=torch.float64)])
        back = torch.zeros_like(xs[t.rank])
        group_reduce(y, back, ints[1], ints[0], ints[2], dst, t).wait_post_process()
        return out[:rows].numpy(), back.numpy()

    for r, (out, back) in enumerate(FakeWorld(3).run(main)):
        np.testing.assert_array_equal(out, cast_rows(plan, [x.numpy() for x in xs], r))
        for i, terms in enumerate(contributions(plan, [y.numpy() for y in ys], r)):
            np.testing.assert_allclose(back[i], sum(terms, np.zeros(2)), atol=1e-13)


def test_single_rank_does_not_communicate():
    x = rand(0, 5, 2)
    out, back = torch.zeros(7, 2, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
    lists = [2, 3], [2, 3, 2], [[0], [0]], [0, 0, 0]
    with pytest.raises(ContractError, match="sends 5 rows to itself but expects 7"):
        group_cast(x, out, *lists, SingleTransport())
    out = out[:5]
    group_cast(x, out, [2, 3], [2, 3], [[0], [0]], [0, 0], None).wait_post_process()
    assert torch.equal(out, x)
    group_reduce(x, back, [5], [5], [0], [[0]], SingleTransport()).wait_post_process()
    assert torch.equal(back, x + 1)
