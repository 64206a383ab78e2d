# SPDX-License-Identifier: Apache-2.0
"""Both torch backends against dense float64 autograd, over masks, head layouts, sizes, sinks and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_oracle import NEG_INF, Case, assert_same, make_case, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from magi_attention.common.mask import Mask
from magi_attention.common.slices import (
    BICAUSAL,
    CAUSAL,
    FULL,
    INVCAUSAL,
    SliceTable,
    cut_k,
    empty_slices,
    trim,
)
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels import AttnOptions, Backend, Grads, Partial, SdpaBackend, SdpaOnlineBackend
from magi_attention.kernels.reference.block_iter import block_walk
from magi_attention.kernels.reference.operands import row_delta
from magi_attention.kernels.types import BackwardOperands, Operands, RangeTensors
from magi_attention.testing.masks import random_slices

SMALL_TILES = SdpaOnlineBackend(block_q=24, block_k=40)  # many tiles, none aligned with anything
BACKENDS = [SdpaBackend(), SdpaOnlineBackend(), SMALL_TILES]
IDS = ["sdpa", "sdpa_ol", "sdpa_ol_small"]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=IDS)


def options_of(case: Case) -> AttnOptions:
    return AttnOptions(case.scale, case.softcap, case.sink_layout, return_max_logits=True)


def run(backend: Backend, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Forward and backward in ``dtype``; out is rounded to it in between, as a caller does."""
    q, k, v, dout = case.cast(dtype)
    options = options_of(case)
    sink = None if case.sink is None else case.sink.to(torch.float64 if dtype == torch.float64 else torch.float32)
    part = backend.forward(Operands(q, k, v, case.slices, options, sink))
    grads = backend.backward(BackwardOperands(dout, q, k, v, part.out.to(dtype), part.lse, case.slices, options, sink))
    got = {"out": part.out, "lse": part.lse, "max_logits": part.max_logits}
    got |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return got if sink is None else got | {"dsink": grads.dsink}


def check(backend: Backend, case: Case, dtype: torch.dtype = torch.float64, tol: float = 1e-12) -> None:
    got, want = run(backend, case, dtype), truth(case).tensors()
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_same(name, x, want[name], tol)


@each_backend
@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tq=st.sampled_from([1, 5, 63, 64, 65, 127, 129]),
    tk=st.sampled_from([1, 5, 63, 64, 65, 127, 129]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 1)]),
    dims=st.sampled_from([(8, 8), (16, 24), (24, 5)]),
    softcap=st.sampled_from([0.0, 0.7]),
    sinks=st.sampled_from([None, 1, 5]),
    per_row=st.booleans(),
)
def test_random_masks(backend, seed, tq, tk, heads, dims, softcap, sinks, per_row):
    slices = random_slices(np.random.default_rng(seed), tq, tk, max_slices=10)
    shape = None if sinks is None else ((tq, sinks, heads[0]) if per_row else (sinks, heads[0]))
    check(backend, make_case(seed, tq, tk, slices, heads, dims, softcap, shape))


@each_backend
@pytest.mark.parametrize("kind", [FULL, CAUSAL, INVCAUSAL, BICAUSAL])
@pytest.mark.parametrize("size", [(1, 1), (65, 65), (5, 2), (2, 5), (129, 64), (63, 127)])
def test_one_slice_of_each_type(backend, kind, size):
    tq, tk = size
    check(backend, make_case(7, tq + 3, tk + 4, np.array([[2, 2 + tq, 1, 1 + tk, kind]])))


@each_backend
@pytest.mark.parametrize("softcap", [0.0, 0.8])
def test_a_pair_of_two_slices_counts_twice(backend, softcap):
    slices = np.array([[0, 50, 0, 60, CAUSAL], [10, 40, 5, 64, FULL], [0, 50, 20, 64, INVCAUSAL]])
    check(backend, make_case(3, 50, 64, slices, softcap=softcap, sink_shape=(2, 4)))
    again = np.array([[0, 50, 0, 64, FULL], [0, 50, 0, 64, FULL], [0, 25, 0, 64, FULL]])
    check(backend, make_case(4, 50, 64, again, softcap=softcap))


@each_backend
@pytest.mark.parametrize("sink_shape", [None, (2, 4), "ssh"])
@pytest.mark.parametrize("size", [(0, 9), (9, 0), (0, 0), (9, 9)])
def test_nothing_to_attend(backend, size, sink_shape):
    tq, tk = size
    shape = (tq, 3, 4) if sink_shape == "ssh" else sink_shape
    case = make_case(1, tq, tk, empty_slices(), sink_shape=shape)
    check(backend, case)
    got = run(backend, case)
    assert (got["out"] == 0).all() and (got["max_logits"] == NEG_INF).all()


@each_backend
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_extreme_sinks(backend, per_row, shift):
    slices = np.array([[0, 30, 0, 70, CAUSAL]])  # rows 30..39 have a sink and nothing else
    shape = (40, 40, 4) if per_row else (40, 4)
    check(backend, make_case(5, 40, 70, slices, sink_shape=shape, sink_shift=shift), tol=1e-11)


@each_backend
@pytest.mark.parametrize("scale", [0.0, -0.4])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_a_scale_may_be_any_finite_number(backend, scale, softcap):
    case = make_case(13, 65, 70, np.array([[0, 65, 0, 70, CAUSAL]]), softcap=softcap)
    case.scale = scale
    check(backend, case)


@pytest.mark.parametrize("name, value", [
    *(("softmax_scale", x) for x in (float("nan"), float("inf"))),
    *(("softcap", x) for x in (float("nan"), float("inf"), -1.0)),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ContractError, match=f"{name} is .*; give"):
        AttnOptions(**{"softmax_scale": 1.0, name: value})


@each_backend
def test_float32(backend):
    slices = random_slices(np.random.default_rng(4), 300, 260, max_slices=12)
    check(backend, make_case(4, 300, 260, slices, softcap=1.1, sink_shape=(2, 4)), torch.float32, tol=2e-6)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_16_bit_error_is_at_most_twice_the_plain_one(backend, dtype, heads):
    slices = random_slices(np.random.default_rng(8), 257, 300, max_slices=8, drop=0.0)
    case = make_case(8, 257, 300, slices, heads, (32, 32), sink_shape=(2, 4), representable=dtype)
    got, want, plain = run(backend, case, dtype), truth(case).tensors(), truth(case, dtype).tensors()
    for name, x in got.items():
        ours = x.to(dtype) if name not in ("lse", "max_logits") else x
        finite = want[name] != NEG_INF
        error = (ours.double() - want[name])[finite].abs().max()
        allowed = 2 * (plain[name].double() - want[name])[finite].abs().max()
        assert error <= max(allowed, 1e-6), f"{name}: {error:.2e} above {allowed:.2e}"


@each_backend
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_stages_accumulate_to_one_call(backend, with_sink, order):
    rng = np.random.default_rng(21)
    tq, tk = 90, 129
    slices = trim(random_slices(rng, tq, tk, max_slices=10))
    case = make_case(21, tq, tk, slices, softcap=1.5, sink_shape=(3, 4) if with_sink else None)
    options, edges = options_of(case), [0, 40, 41, tk]
    part: Partial | None = None
    stages = []
    for n, i in enumerate(order):
        a, b = edges[i], edges[i + 1]
        pieces = cut_k(slices, a, b)[0] - np.array([0, 0, a, a, 0])
        sink = case.sink if n == 0 else None  # exactly one stage applies it
        stages.append((a, b, SliceTable(pieces), sink))
        before = part
        part = backend.forward(Operands(case.q, case.k[a:b], case.v[a:b], stages[-1][2], options, sink), part)
        assert before is None or part is before
    want = truth(case).tensors()
    for name in ("out", "lse", "max_logits"):
        assert_same(name, getattr(part, name), want[name], 1e-12)
    delta = row_delta(part.out, case.dout, None)
    total = Grads(torch.zeros_like(case.q), torch.zeros_like(case.k), torch.zeros_like(case.v))
    for n, (a, b, table, sink) in enumerate(stages):
        init = Grads(total.dq, total.dk[a:b], total.dv[a:b], total.dsink)
        given_delta = delta if n != 1 else None
        got = backend.backward(
            BackwardOperands(
                case.dout, case.q, case.k[a:b], case.v[a:b], part.out, part.lse, table, options, sink, given_delta
            ),
            init,
        )
        assert got is init
        total.dsink = got.dsink
    for name in ("dq", "dk", "dv") + (("dsink",) if with_sink else ()):
        assert_same(name, getattr(total, name), want[name], 1e-12)


@each_backend
def test_wrong_accumulation_buffers_are_refused(backend):
    case = make_case(1, 8, 8, np.array([[0, 8, 0, 8, FULL]]))
    q, k, v, _ = case.cast(torch.bfloat16)
    bad = Partial(torch.zeros(8, 4, 16, dtype=torch.bfloat16), torch.zeros(8, 4))
    with pytest.raises(ContractError, match="out is .* make it"):
        backend.forward(Operands(q, k, v, case.slices, options_of(case)), bad)


@each_backend
def test_any_strides(backend):
    case = make_case(2, 70, 70, np.array([[0, 70, 0, 70, CAUSAL]]), heads=(2, 2))
    want = run(backend, case)
    packed = torch.stack([case.q, case.k, case.v], dim=2)  # (T, H, 3, D)
    strided = Case(
        packed[:, :, 0],
        packed[:, :, 1].transpose(0, 1).contiguous().transpose(0, 1),
        packed.flip(0).flip(0)[:, :, 2].transpose(1, 2).contiguous().transpose(1, 2),
        case.dout.repeat(2, 1, 1)[::1][:70],
        case.slices,
        case.scale,
    )
    assert not strided.q.is_contiguous() and not strided.v.is_contiguous()
    for name, x in run(backend, strided).items():
        assert torch.equal(x, want[name]), name


@each_backend
def test_garbage_in_unseen_rows_does_not_leak(backend):
    slices = np.array([[4, 40, 10, 60, CAUSAL], [50, 60, 70, 75, BICAUSAL]])
    case = make_case(9, 64, 80, slices)
    want = run(backend, case)
    unseen_q, unseen_k = [0, 3, 44, 57, 63], [0, 9, 60, 69, 79]
    for rows, x in ((unseen_q, case.q), (unseen_q, case.dout), (unseen_k, case.k), (unseen_k, case.v)):
        x[rows[0]], x[rows[1]], x[rows[2:]] = float("nan"), float("inf"), float("-inf")
    for name, x in run(backend, case).items():
        assert torch.equal(x, want[name]), name


@each_backend
def test_two_runs_are_bitwise_equal(backend):
    slices = random_slices(np.random.default_rng(13), 300, 300, max_slices=12)
    case = make_case(13, 300, 300, slices, softcap=2.0, sink_shape=(1, 4))
    first, second = (run(backend, case, torch.float32) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@each_backend
def test_errors_say_what_to_do(backend):
    case = make_case(1, 8, 8, np.array([[0, 8, 0, 9, FULL]]))
    with pytest.raises(ContractError, match="k row 9, but there are only 8"):
        backend.forward(Operands(case.q, case.k, case.v, case.slices, options_of(case)))
    with pytest.raises(ContractError, match="do not fit"):
        backend.forward(Operands(case.q[:, :3], case.k, case.v, SliceTable(empty_slices()), options_of(case)))
    with pytest.raises(ContractError, match="sink has shape"):
        backend.forward(
            Operands(case.q, case.k, case.v, SliceTable(empty_slices()), options_of(case), torch.zeros(2, 3).double())
        )
    ranges = RangeTensors(*Mask.causal(8).slices.tensors())
    with pytest.raises(UnsupportedError, match="reads no range tensors"):
        backend.forward(Operands(case.q, case.k, case.v, ranges, options_of(case)))
    with pytest.raises(UnsupportedError, match="shd"):
        AttnOptions(1.0, sink_layout="shd")
    with pytest.raises(ContractError, match="positive sizes"):
        SdpaOnlineBackend(block_q=0)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_online_memory_and_work_follow_the_mask():
    """A band in 64k x 64k tokens: the dense mask alone would take 4 GiB, one head of logits 16 GiB."""
    n, width = 65536, 64
    table = SliceTable(np.array([[0, n - width + 1, 0, n, BICAUSAL]]))
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 8, generator=gen) for _ in range(3))
    options = AttnOptions(8**-0.5)
    backend = SdpaOnlineBackend()
    with LargestTensor() as largest:
        part = backend.forward(Operands(q, k, v, table, options))
        grads = backend.backward(BackwardOperands(q, q, k, v, part.out, part.lse, table, options))
    # 256 rows see 319 keys, which lie in at most two blocks of 512: no tile beyond these is visited.
    walk = block_walk(table, backend.block_q, backend.block_k)
    assert sum(len(block.tiles) for block in walk) <= 2 * n // backend.block_q
    assert largest.numel == q.numel()
    row = 30000
    seen = slice(row, row + width)
    p = torch.softmax(q[row, 0].double() @ k[seen, 0].double().T * options.softmax_scale, -1)
    assert torch.allclose(part.out[row, 0].double(), p @ v[seen, 0].double(), atol=1e-5)
    assert (part.lse[n - width + 1 :] == NEG_INF).all() and (grads.dq[n - width + 1 :] == 0).all()
