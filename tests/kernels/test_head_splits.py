# SPDX-License-Identifier: Apache-2.0
"""Where the query heads of all tiles are split because tiles are uneven and dq is summed in order."""

from __future__ import annotations

import pytest
from ffa_simulator import backend
from test_kernel_ffa_backward import Case

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa.schedule import head_splits as head_splits_module
from magi_attention.kernels.ffa.schedule.head_splits import head_splits
from magi_attention.kernels.types import BackwardOperands
from magi_attention.testing.libraries import planner_or_skip

UNEVEN = [0, 2900, 3000, 3300, 3500, 3900, 4096]
NUM_SMS = 132


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def parts_of(slices: SliceTable, total: int = 4096, heads=(64, 8), dims=(128, 128), num_sms=NUM_SMS) -> int:
    shapes = (total, heads[0], dims[0]), (total, heads[1], dims[1])
    return head_splits(slices, *shapes, num_sms)


def test_one_long_document_among_short_ones():
    assert parts_of(Mask.varlen(UNEVEN).slices) == 2


def test_not_where_one_tile_is_more_than_an_even_share():
    """Halves would end sooner by the model, and were measured to be no faster."""
    assert parts_of(Mask.varlen(UNEVEN, causal=True).slices) == 0


@pytest.mark.parametrize(
    "mask",
    (Mask.full(4096), Mask.causal(4096), Mask.sliding_window(4096, (1023, 0)), Mask.varlen(list(range(0, 4097, 512)))),
    ids=("full", "causal", "window", "equal documents"),
)
def test_not_where_tiles_are_alike(mask):
    assert parts_of(mask.slices) == 0


def test_not_where_it_cannot_help():
    mask = Mask.varlen(UNEVEN).slices
    assert parts_of(mask, heads=(24, 8)) == 0  # three query heads of a kv head
    assert parts_of(mask, dims=(256, 256)) == 0
    assert parts_of(mask, heads=(128, 16)) == 0  # so many work tiles that the last ones are short
    assert parts_of(mask, num_sms=40) == 0  # the same
    assert parts_of(mask, num_sms=140) == 0  # so few that heads are split anyway
    assert parts_of(SliceTable([])) == 0


def test_what_was_found_is_kept_with_the_mask(monkeypatch):
    mask, made, make = Mask.varlen(UNEVEN).slices, [], head_splits_module._head_splits
    monkeypatch.setattr(head_splits_module, "_head_splits", lambda *a: made.append(a[-1]) or make(*a))
    for _ in range(3):
        # For each number of SMs, as machines may have GPUs of two kinds.
        assert [parts_of(mask), parts_of(mask, num_sms=40)] == [2, 0]
    assert made == [NUM_SMS, 40]


@pytest.mark.parametrize("is_deterministic", (False, True))
def test_the_kernel_gets_it(is_deterministic):
    ffa, simulator = backend()
    ffa.runtime.num_sms = lambda index: 1
    documents = [0, 512, 576, 640, 704, 768]
    slices = Mask.varlen(documents).slices
    case = Case(slices, 768, 768, AttnOptions(0.3, deterministic=is_deterministic), heads=(16, 2))
    ffa.backward(BackwardOperands(*case.tensors, slices, case.options))
    ffa.runtime.num_sms = lambda index: 6
    again = Mask.varlen(documents).slices
    ffa.backward(BackwardOperands(*case.tensors, again, case.options))
    assert [c.num_head_splits for c in simulator.backward_calls] == [0, 2 if is_deterministic else 0]
