# SPDX-License-Identifier: Apache-2.0
"""Counts, positions and windows: integers of any kind count alike, and nothing is cut to one in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import (
    Mask,
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    make_plan,
)
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.intervals import as_intervals
from magi_attention.common.range import AttnRange
from magi_attention.common.scalars import as_int, as_int_array
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.tables import table_from_attn_arg, table_from_tensors

NO_INTEGERS = [4.5, 4.0, np.float64(4.5), np.float32(4.0), torch.tensor(4.5), "4", 4 + 0j]
NO_COUNTS = [True, np.bool_(True), torch.tensor(True), None]  # of these lists may hold some
WHOLE = AttnRange(0, 9)


def tree(length=4, parent=0) -> Mask:
    return Mask.prefix_tree([4, length], [-1, parent])


def batch(*sizes) -> list:
    return [cu.tolist() for cu in infer_varlen_mask_from_batch(*sizes, "cpu")]


COUNTS = {  # what takes one integer
    "window left": lambda x: Mask.varlen([0, 9], window=(x, 0)),
    "window right": lambda x: Mask.sliding_window(9, (0, x)),
    "window_size": lambda x: infer_attn_mask_from_cu_seqlens([0, 9], [0, 9], window_size=(x, 0)),
    "window of a segment": lambda x: infer_attn_mask_from_sliding_window(WHOLE, WHOLE, (x, x)),
    "global prefix": lambda x: Mask.sliding_window(9, (2, 0), global_prefix=x),
    "total": Mask.full,
    "total of prefix_lm": lambda x: Mask.prefix_lm(x, 2),
    "total of block_causal": lambda x: Mask.block_causal(x, 2),
    "block": lambda x: Mask.block_causal([0, 9], x),
    "cp_size": lambda x: make_plan(Mask.causal(9), x),
    "pad of a total": lambda x: compute_pad_size(x, 2, 2),
    "pad of chunks": lambda x: compute_pad_size(9, 2, x),
    "samples": lambda x: batch(x, 4),
    "length of samples": lambda x: batch(2, x),
    "split": lambda x: GroupSpec.make(0, 1, [x], [[0]], [4], [0]),
    "destination": lambda x: GroupSpec.make(4, 5, [2], [[x]], [2], [4]),
}
LISTED = {  # what takes integers in lists
    "cu_seqlens": lambda x: Mask.varlen([0, x, 9]),
    "q range": lambda x: Mask.from_slices([[0, x]], [[0, 4]]),
    "k range": lambda x: Mask.from_slices([[0, 4]], [[0, x]]),
    "prefix": lambda x: Mask.prefix_lm([0, 9, 18], [x, 2]),
    "one prefix": lambda x: Mask.prefix_lm([0, 9, 18], x),
    "length of a node": tree,
    "interval": lambda x: as_intervals([(0, x)]).tolist(),
    "slices": lambda x: SliceTable([[0, x, 0, 9, 0]]),
}


def shown(value) -> str:
    return f"{type(value).__name__} {value}"


@pytest.mark.parametrize("place", COUNTS | LISTED)
@pytest.mark.parametrize("value", NO_INTEGERS, ids=shown)
def test_what_is_no_integer_is_a_sentence(place, value) -> None:
    with pytest.raises(ContractError, match="give (an integer|integers)"):
        (COUNTS | LISTED)[place](value)


@pytest.mark.parametrize("place", COUNTS)
@pytest.mark.parametrize("value", NO_COUNTS, ids=shown)
def test_truth_and_nothing_are_no_counts(place, value) -> None:
    with pytest.raises(ContractError, match="give (an integer|integers|a 1-D)"):
        COUNTS[place](value)


@pytest.mark.parametrize("place", COUNTS | LISTED)
def test_integers_of_any_kind_count_alike(place) -> None:
    make = (COUNTS | LISTED)[place]
    for kind in (np.int32, np.uint8, torch.tensor, lambda x: torch.tensor([x], dtype=torch.int16)[0]):
        assert make(kind(4)) == make(4)


def test_a_parent_is_an_integer() -> None:
    assert tree(parent=np.int64(0)) == tree(parent=torch.tensor(0)) == tree()
    with pytest.raises(ContractError, match="parents holds floats, such as -0.5"):
        tree(parent=-0.5)


@pytest.mark.parametrize("window", [4, None, (4,), (4, 0, 0), "40", {}, torch.tensor(4), 4.5])
def test_a_window_is_a_pair(window) -> None:
    for make in (
        lambda: Mask.varlen([0, 9], window=window),
        lambda: Mask.sliding_window(9, window),
        lambda: infer_attn_mask_from_cu_seqlens([0, 9], [0, 9], window_size=window),
        lambda: infer_attn_mask_from_sliding_window(WHOLE, WHOLE, window),
    ):
        with pytest.raises(ContractError, match=r"window(_size)? is .*give a pair \(left, right\)"):
            make()
    for good in ([4, 0], np.array([4, 0]), torch.tensor([4, 0])):
        assert Mask.varlen([0, 9], window=good) == Mask.varlen([0, 9], window=(4, 0))


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        (torch.tensor([[0, 9]]), r"shape \(1, 2\); give a 1-D array"),
        ([3, 9], "starts at 3"),
        ([9], "starts at 9"),
        (torch.tensor([0.0, 9.0]), "holds floats, such as 0.0"),
        ([0, 4.5, 9], "holds floats, such as 4.5"),
        ([0, True, 9], "holds bools"),
        (np.array([True, False]), "holds bools"),
        (torch.tensor([0, 9, -1, -1], dtype=torch.int32), r"is -1 from entry 2 on, .*give .* cu_seqlens\[:2\]"),
        ([], r"shape \(0,\)"),
        (None, "is None"),
        ("0,9", "is '0,9'"),
        ([0, [1, 2]], "no array of integers"),
        (np.array([0, 2**63], dtype=np.uint64), "give integers below 2"),
        ([0, 2**70], "give integers"),
    ],
    ids=str,
)
def test_odd_cu_seqlens_are_sentences(cu_seqlens, words) -> None:
    with pytest.raises(ContractError, match=words):
        Mask.varlen(cu_seqlens)


def test_odd_cu_seqlens_that_are_right() -> None:
    assert Mask.varlen([0]).total_q == 0
    assert Mask.varlen(torch.tensor([0, 9, 9, 9])).cu_seqlens == (0, 9)
    assert Mask.varlen([0, 2**29, 2**30]).total_q == 2**30
    with pytest.raises(ContractError, match="fewer than .* can be counted"):
        Mask.varlen([0, 2**31, 2**32])
    for dtype in (torch.int16, torch.uint8, torch.int64):
        assert Mask.varlen(torch.tensor([0, 4, 9], dtype=dtype)) == Mask.varlen((0, 4, 9))


def test_ranges_of_kernel_calls_are_integers() -> None:
    whole, cut = torch.tensor([[0, 9]]), torch.tensor([[0.0, 4.5]])
    for q, k, types, name in (
        (cut, whole, None, "q_ranges"),
        (whole, cut, None, "k_ranges"),
        (whole, whole, torch.tensor([1.5]), "attn_type_map"),
    ):
        with pytest.raises(ContractError, match=f"{name} holds floats"):
            table_from_tensors(q, k, types)
        argument = type("Argument", (), {"q_ranges": q, "k_ranges": k, "attn_type_map": types})
        with pytest.raises(ContractError, match="holds floats|Unknown AttnMaskType 1.5"):
            table_from_attn_arg(argument)


def test_as_int_and_as_int_array() -> None:
    assert as_int(torch.tensor([7]), "n") == as_int(np.int8(7), "n") == 7
    with pytest.raises(ContractError, match=r"n is tensor\(\[1, 2\]\)"):
        as_int(torch.tensor([1, 2]), "n")
    assert as_int_array([], "n").dtype == as_int_array(np.uint8([3]), "n").dtype == np.int64
    values = np.arange(6).reshape(2, 3)
    assert np.array_equal(as_int_array(torch.from_numpy(values), "n"), values)
