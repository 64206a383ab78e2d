# SPDX-License-Identifier: Apache-2.0
"""Head groups that go to ranks of their own, against dense float64 attention; what they have not; what they save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from test_dist_attn import Case, cases, check_beside_dense, make_config, make_problem

from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.mask import Mask
from magi_attention.config import DispatchConfig, DistAttnConfig
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import AttnRuntime
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.kernels import default_registry
from magi_attention.meta.planner import PlanOptions, build_plan, plan_by_head_groups
from magi_attention.testing.libraries import planner_or_skip


def plans_of(case: Case):
    """A plan of tokens, that of its head groups, and the problem."""
    planner_or_skip()
    case = replace(case, cp=max(case.cp, 2), uneven=False, sink=False)
    _, slices, total, tensors, _ = make_problem(case)
    heads = dict(num_heads_q=case.heads[0], num_heads_kv=case.heads[1])
    plan = build_plan(slices, total, case.cp, PlanOptions(**heads), config=make_config(case))
    return case, plan, plan_by_head_groups(plan, "always"), slices, total, tensors


@settings(max_examples=40, deadline=None, print_blob=True)
@given(case=cases)
def test_equals_dense_attention(case: Case) -> None:
    note(f"seed {case.seed}")
    torch.set_num_threads(1)
    case, plan, by_groups, *problem = plans_of(case)
    check_beside_dense(case, plan, *problem, None, by_groups=by_groups)


@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_a_token_has_one_owner_and_each_group_its_mask(case: Case) -> None:
    note(f"seed {case.seed}")
    case, plan, by_groups, slices, total, _ = plans_of(case)
    groups, tokens = plan.num_heads_kv, plan.padded_tokens
    for rank in range(plan.cp_size):
        own = plan.position_array(rank)
        wanted = np.concatenate([own + group * tokens for group in range(groups)])
        assert np.array_equal(by_groups.position_array(rank), wanted)
    assert by_groups.areas.sum() == groups * plan.areas.sum()
    assert by_groups.areas.max() <= max(groups * plan.areas.max(), 1.02 * groups * plan.areas.sum() / plan.cp_size)


def test_what_they_save():
    """As many ranks as kv heads: one group each, as in DeepSpeed-Ulysses. A rank is sent its group of other tokens."""
    planner_or_skip()
    plan = build_plan(Mask.full(4096).slices, 4096, 4, PlanOptions(4, 4, 64))
    by_groups = plan_by_head_groups(plan, "always")
    assert by_groups.comm_matrix().sum() == by_groups.query_matrix().sum() == 3 * 4096
    assert by_groups.imbalance == 1


def test_what_is_refused():
    planner_or_skip()
    plan = build_plan(Mask.causal(64).slices, 64, 2, PlanOptions(4, 2, 8))
    by_groups = plan_by_head_groups(plan, "always")

    def run(transport, words, error, heads=2, **options):
        runtime = AttnRuntime(by_groups, transport, default_registry(), head_groups=2)
        q, k = torch.zeros(32, 4, 8), torch.zeros(32, heads, 8)
        with pytest.raises(error, match=words):
            dist_attn(q, k, k, runtime, **options)

    for words, error, options in (
        ("no sink", UnsupportedError, dict(sink=torch.zeros(1, 4))),
        ("max_logits", UnsupportedError, dict(return_max_logits=True)),
        ("has 4", ContractError, dict(heads=4)),
    ):
        FakeWorld(2).run(partial(run, words=words, error=error, **options))
    config = DistAttnConfig(DispatchConfig(7, uneven_shard=True))
    uneven = build_plan(Mask.causal(50).slices, 50, 2, PlanOptions(4, 2), config=config)
    with pytest.raises(ContractError, match="uneven_shard"):
        plan_by_head_groups(uneven, "always")
