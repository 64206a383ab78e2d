# SPDX-License-Identifier: Apache-2.0
"""Backwards in which the first writer of a block of dq stores, with m-blocks of either size: the tests of the others
once more, where masks would not choose it, too, and with dq written at once where a block has a single contribution.
That masks do: ``tests/kernels/schedule``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from backward_oracle import assert_grads, assert_near, assert_same, make_dout, truth, watch_backwards
from forward_oracle import make_inputs
from graph_capture import capture
from long_kernels import beside_long_kernels
from places import in_a_process
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    pytestmark,
    test_families_and_gqa,
    test_random_masks,
    test_sinks,
    test_softcap,
    test_special_slices,
    test_stages_add_up_in_float32,
    test_strided_and_misaligned_inputs,
    test_what_unseen_rows_hold_does_not_matter,
)
from test_ffa_backward_deterministic import CASES

from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.peer_kv import RemoteKeys
from magi_attention.kernels.types import Grads
from magi_attention.native import abi
from magi_attention.native.planner.schedule import BwdSchedule


class Mode(NamedTuple):
    queries: int
    direct_dq_store: bool = False


MODES = {"64": Mode(64), "80": Mode(80), "64 direct": Mode(64, True), "80 direct": Mode(80, True)}


def first_writer_of(mode: Mode):
    def select_schedule(q_shape, v_shape, mask, options, processors) -> BwdSchedule:
        is_wide = mode.queries == 80 and not options.softcap and 64 < max(q_shape[2], v_shape[2]) <= 128
        is_local = not isinstance(mask, RemoteKeys)
        direct = mode.direct_dq_store and is_local and not options.softcap
        stores = not options.deterministic and is_local
        return BwdSchedule(80 if is_wide else 64, 0, first_writer=stores, direct_dq_store=direct)

    return select_schedule


@pytest.fixture(autouse=True, params=MODES.values(), ids=MODES)
def mode(request, monkeypatch) -> Mode:
    monkeypatch.setattr(ffa_backward, "select_schedule", first_writer_of(request.param))
    return request.param


@pytest.fixture
def orders(monkeypatch) -> list[int]:
    """The order of dq of each launch."""
    found: list[int] = []
    watch_backwards(monkeypatch, lambda params: found.append(params.dq_mode))
    return found


@each_dtype
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (72, 120), (256, 256)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_many_times(name, dims, dtype, orders):
    """Nothing is cleared, and memory holds NaN before: an addition that overtakes the first store would show."""
    for total, heads in ((1337, (8, 2)), (300, (5, 1)), (65, (2, 2))):
        x = make_inputs(0, CASES[name](total), total, total, heads, dims, dtype=dtype, device=DEVICE)
        dout = make_dout(x)
        want = truth(x, dout)
        for _ in range(5):
            assert_grads(x, differentiate(x, dout), want, (name, total, heads))
    assert orders == 15 * [abi.DQ_FIRST_WRITER]


@pytest.mark.parametrize("margin", (1, 40, 131))
def test_with_multiprocessors_left_free(margin):
    for name, make in CASES.items():
        x = make_inputs(2, make(1000), 1000, 1000, (8, 2), (128, 128), device=DEVICE)
        dout = make_dout(x)
        assert_grads(x, differentiate(x, dout, sm_margin=margin), truth(x, dout), (name, margin))


def undisturbed(x, dout) -> Grads:
    """With nothing beside it; and deterministic mode, which may traverse in another order, comes to nearly the same."""
    torch.cuda.synchronize()
    found = differentiate(x, dout)
    assert_near(found, differentiate(x, dout, deterministic=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_beside_other_work(name):
    total = 4096
    x = make_inputs(1, CASES[name](total), total, total, (16, 2), (128, 128), device=DEVICE)
    dout, noise = make_dout(x), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    want, side = undisturbed(x, dout), torch.cuda.Stream()
    for n in range(10):
        with torch.cuda.stream(side):
            for _ in range(n):
                noise = torch.nn.functional.normalize(noise @ noise)
        assert_same(differentiate(x, dout), want, x.q.dtype, (name, n))
    torch.cuda.synchronize()


def short_work_tiles_beside_long_kernels(rank: int, world: int, mode: Mode) -> bool:
    ffa_backward.select_schedule = first_writer_of(mode)
    for name, make in CASES.items():
        for dim in (64, 128, 256):
            x = make_inputs(3, make(700), 700, 700, (8, 2), (dim, dim), device=DEVICE)
            dout = make_dout(x)
            want = undisturbed(x, dout)
            for n in beside_long_kernels():
                assert_same(differentiate(x, dout), want, x.q.dtype, (name, dim, n))
    return True


def two_at_a_time(rank: int, world: int, mode: Mode) -> bool:
    """On two streams, every third in deterministic mode."""
    ffa_backward.select_schedule = first_writer_of(mode)
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = make_inputs(4, CASES["causal"](4096), 4096, 4096, (16, 2), (128, 128), device=DEVICE)
    dout, found = make_dout(x), []
    wants = undisturbed(x, dout), differentiate(x, dout, deterministic=True)
    torch.cuda.synchronize()
    for n in range(30):
        with torch.cuda.stream(streams[n % 2]):
            found.append(differentiate(x, dout, deterministic=n % 3 == 0))
    torch.cuda.synchronize()
    for n, again in enumerate(found):
        assert_same(again, wants[n % 3 == 0], x.q.dtype, n)
    return True


def graphs_beside_each_other(rank: int, world: int, mode: Mode) -> bool:
    """Replays of two graphs, which are not put one after the other."""
    ffa_backward.select_schedule = first_writer_of(mode)
    x = make_inputs(5, CASES["documents"](3000), 3000, 3000, (16, 2), (128, 128), device=DEVICE)
    dout, leaves, ranges = make_dout(x), [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)], x.ranges

    def step() -> Grads:
        out, _ = flex_flash_attn_func(*leaves, *ranges, softmax_scale=x.scale)
        return Grads(*torch.autograd.grad(out, leaves, dout))

    want = undisturbed(x, dout)
    pairs = [capture(step)[::2] for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for n in range(20):
        for stream, (graph, got) in zip(streams, pairs):
            with torch.cuda.stream(stream):
                for grad in (got.dq, got.dk, got.dv):
                    grad.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        for _, got in pairs:
            assert_same(got, want, x.q.dtype, ("graphs", n))
    return True


WORK = (short_work_tiles_beside_long_kernels, two_at_a_time, graphs_beside_each_other)


@pytest.mark.parametrize("work", WORK, ids=lambda f: f.__name__)
def test_nobody_waits_for_ever(work, mode):
    assert in_a_process(work, mode)
