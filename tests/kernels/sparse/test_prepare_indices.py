# SPDX-License-Identifier: Apache-2.0
"""Lists of keys come out sorted, each key once, and the environment decides which implementation runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.errors import ContractError, NoBackendError
from magi_attention.kernels.index_attn import IndexProblem, backends, choose, prepare, prepare_indices
from magi_attention.kernels.index_attn.prepare import prepare_op
from magi_attention.kernels.types import AttnOptions


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_the_sorted_set_of_each_list(seed):
    rng = np.random.default_rng(seed)
    tokens, heads, width, total = (int(rng.integers(low, high)) for low, high in ((0, 6), (1, 4), (0, 9), (1, 8)))
    indices = rng.integers(-3, total, size=(tokens, heads, width))
    dtype = torch.int32 if seed % 2 else torch.int64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "CHUNK", 2 * heads * max(width, 1))  # two lists at a time
        lists = prepare_indices(torch.from_numpy(indices).to(dtype), total)
    assert lists.rows.dtype == lists.counts.dtype == torch.int32 and lists.rows.is_contiguous() and lists.is_plain
    for t in range(tokens):
        for h in range(heads):
            wanted = sorted({int(i) for i in indices[t, h] if i >= 0})
            assert lists.rows[t, h].tolist() == wanted + [-1] * (width - len(wanted))
            assert lists.counts[t, h] == len(wanted)


def test_entries_beyond_the_keys_are_refused_by_name():
    one = torch.tensor([[[4]]])
    assert prepare_indices(one, 5).counts.item() == 1
    with pytest.raises(ContractError, match="index is 4, but k has only 4 rows"):
        prepare_indices(one, 4)
    assert prepare_indices(one, 33, k_block_size=8).counts.item() == 1
    with pytest.raises(ContractError, match="index is 4 in blocks of 8, but k has only 32 rows"):
        prepare_indices(one, 32, k_block_size=8)
    with pytest.raises(ContractError, match="index is 4 in blocks of 8, but k has only 33 rows"):
        prepare_indices(one, 33, k_block_size=8, k_start=torch.tensor([1]))
    for wrong in (one.float(), one[0]):
        with pytest.raises(ContractError, match="give int32 or int64"):
            prepare_indices(wrong, 5)
    for options in (dict(k_block_size=0), dict(k_start=torch.tensor([1, 2])), dict(k_end=torch.tensor([1.0]))):
        with pytest.raises(ContractError, match="block sizes are 1 and 0|k_start is|k_end is"):
            prepare_indices(one, 5, **options)


def test_the_op_that_prepares_is_registered_soundly():
    indices = torch.tensor([[[2, -1, 2, 0]]], dtype=torch.int32)
    for start in (None, torch.tensor([1])):
        torch.library.opcheck(prepare_op, (indices, 5, 1, start))


def test_the_environment_decides_who_runs(monkeypatch):
    q, k = torch.zeros(1, 4, 8), torch.zeros(3, 2, 8)
    lists = prepare_indices(torch.zeros(1, 2, 1, dtype=torch.int32), 3)
    problem = IndexProblem.of_lists(q, k, k, AttnOptions(1.0), lists)
    assert (problem.topk, problem.q_block_size, problem.k_block_size, problem.num_heads_kv) == (1, 1, 1, 2)
    assert choose(problem) == next(b for b in backends() if b.why_not(problem) is None)
    for name in ("sdpa", "sdpa_ol"):
        monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", name)
        assert choose(problem) == backends()[-1]
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "fa4")
    with pytest.raises(NoBackendError, match=r"asks for 'fa4'(.|\n)*sdpa: 'fa4' was asked for"):
        choose(problem)
    monkeypatch.delenv("MAGI_ATTENTION_KERNEL_BACKEND")
    whole = IndexProblem.of_lists(q.long(), k, k, AttnOptions(1.0), lists)
    with pytest.raises(NoBackendError, match="sdpa: The torch backends compute float16"):
        choose(whole)
