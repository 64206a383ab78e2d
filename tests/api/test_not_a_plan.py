# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of a plan, a key or lists of keys and is none: a sentence says what to give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import (
    Mask,
    attend,
    attend_index,
    attend_replicated_kv,
    calc_attn,
    dispatch,
    index_attn_func,
    make_plan,
    prepare_index_exchange,
    prepare_indices,
)
from magi_attention.errors import ContractError, UnknownKeyError

Q = torch.zeros(8, 2, 4)
LISTS = torch.zeros(8, 2, 1, dtype=torch.int64)
MASK = Mask.causal(8)
NO_PLANS = {
    "a Mask": (MASK, r"plan is a Mask; plan it once, make_plan\(mask, cp_size\)"),
    "a tensor": (torch.ones(8, 8).tril().bool(), "plan is a tensor; .*Mask.from_dense of a matrix"),
    "a list": ([[True] * 8] * 8, "plan is of type list; .*Mask.from_dense of a matrix"),
    "None": (None, "plan is of type NoneType; give the plan"),
}
CALLS = {
    "attend": lambda plan: attend(Q, Q, Q, plan),
    "attend on meta": lambda plan: attend(*[Q.to("meta")] * 3, plan),
    "attend_index": lambda plan: attend_index(Q, Q, Q, LISTS, plan),
    "prepare_index_exchange": lambda plan: prepare_index_exchange(LISTS, plan),
    "attend_replicated_kv": lambda plan: attend_replicated_kv(Q, Q, Q, plan, [0, 8]),
}


@pytest.mark.parametrize(("given", "words"), NO_PLANS.values(), ids=NO_PLANS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_no_plan(call, given, words) -> None:
    with pytest.raises(ContractError, match=words):
        call(given)


@pytest.mark.parametrize("given", [MASK, make_plan(MASK, 1)], ids=["mask", "plan"])
@pytest.mark.parametrize("call", [lambda key: calc_attn(Q, Q, Q, key), lambda key: dispatch(Q, key)])
def test_what_is_no_key(call, given) -> None:
    words = f"key is {type(given).__name__}; make one with magi_attn_flex_key .* or use attend"
    with pytest.raises(UnknownKeyError, match=words):
        call(given)


def test_other_things_are_no_key() -> None:
    for given in (torch.ones(8, 8), [[0, 8]], None):
        with pytest.raises(UnknownKeyError, match="make one with magi_attn_flex_key or magi_attn_varlen_key.$"):
            calc_attn(Q, Q, Q, given)


LIST_CALLS = {
    "index_attn_func": lambda lists: index_attn_func(Q, Q, Q, lists),
    "attend_index": lambda lists: attend_index(Q, Q, Q, lists, make_plan(MASK, 1)),
    "prepare_indices": lambda lists: prepare_indices(lists, 8),
    "prepare_index_exchange": lambda lists: prepare_index_exchange(lists, make_plan(MASK, 1)),
}


@pytest.mark.parametrize("lists", [LISTS.tolist(), [[[0], [1, 2]]] * 8, LISTS.numpy(), None, np.int64(3)], ids=str)
@pytest.mark.parametrize("call", LIST_CALLS.values(), ids=LIST_CALLS)
def test_lists_of_keys_are_a_tensor(call, lists) -> None:
    words = rf"indices are a {type(lists).__name__}; give a tensor, int32 or int64 \(queries, kv heads, keys\)"
    with pytest.raises(ContractError, match=words):
        call(lists)
    call(LISTS)
