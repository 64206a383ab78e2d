# SPDX-License-Identifier: Apache-2.0
"""Numbers given as tensors or numpy scalars: what they are now counts, and what has no meaning is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention import api
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.mask import Mask
from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import ContractError
from magi_attention.functional.fa4 import fa4_fwd, ffa_fa4_func
from magi_attention.functional.sdpa import sdpa_fwd, sdpa_online_fwd
from magi_attention.testing.ref_attn import ref_attn_func

TOTAL = 24
RANGES = torch.tensor([[0, TOTAL]], dtype=torch.int32)
TYPES = torch.tensor([1], dtype=torch.int32)
ARG = type("Arg", (), {"q_ranges": RANGES, "k_ranges": RANGES, "attn_type_map": TYPES})()


def make_key(group, chunk: int = 8):
    ranges = AttnRanges.from_ranges([[0, TOTAL]])
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=chunk))
    return api.magi_attn_flex_key(ranges, ranges, "causal", TOTAL, TOTAL, 2, 2, 8, 0, group, dist_attn_config=config)


@pytest.fixture(params=["attend", "calc_attn", "flex", "ffa_fa4", "fa4_fwd", "sdpa_fwd", "sdpa_online_fwd"])
def call(request, group):
    """A function of (x, options) that gives the output; one object for all calls, as memos are kept with it."""
    plan, key = api.make_plan(Mask.causal(TOTAL), 1), make_key(group)
    return {
        "attend": lambda x, **o: api.attend(x, x, x, plan, **o)[0],
        "calc_attn": lambda x, **o: api.calc_attn(x, x, x, key, **o)[0],
        "flex": lambda x, **o: api.flex_flash_attn_func(x, x, x, RANGES, RANGES, TYPES, **o)[0],
        "ffa_fa4": lambda x, **o: ffa_fa4_func(x, x, x, RANGES, RANGES, TYPES, **o)[0],
        "fa4_fwd": lambda x, **o: fa4_fwd(x, x, x, None, ARG, **o)[0],
        "sdpa_fwd": lambda x, **o: sdpa_fwd(x, x, x, None, ARG, **o)[0],
        "sdpa_online_fwd": lambda x, **o: sdpa_online_fwd(x, x, x, None, ARG, **o)[0],
    }[request.param]


def truth(x: torch.Tensor, softmax_scale: float = 8**-0.5, softcap: float = 0.0) -> torch.Tensor:
    causal = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
    return ref_attn_func(x, x, x, causal, softmax_scale=softmax_scale, softcap=softcap, backend="torch")[0]


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
def test_the_present_value_of_a_tensor_counts(call, option):
    torch.manual_seed(0)
    x = torch.randn(TOTAL, 2, 8, dtype=torch.float64)
    value = torch.tensor(0.3, dtype=torch.float64)
    array = np.full((), 0.3)
    for factor in (1.0, 5.0, 0.2):
        value.mul_(factor)
        array *= factor
        want = truth(x, **{option: value.item()})
        for given in (value, value[None], value.item(), np.float64(value.item()), array):
            torch.testing.assert_close(call(x, **{option: given}), want)
    torch.testing.assert_close(call(x, **{option: np.float32(2.0)}), truth(x, **{option: 2.0}))
    torch.testing.assert_close(call(x, **{option: 2}), truth(x, **{option: 2.0}))


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
def test_a_tensor_that_wants_a_gradient_is_refused(call, option):
    x = torch.randn(TOTAL, 2, 8)
    value = torch.nn.Parameter(torch.tensor(0.3))
    remedy = "multiply q by it and pass softmax_scale as a float" if option == "softmax_scale" else r"softcap.item\(\)"
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(ContractError, match=f"{option} is a tensor that requires a gradient.*{remedy}"):
            call(x, **{option: value})
    call(x, **{option: value.detach()})


@pytest.mark.parametrize("option, value", [
    ("softmax_scale", float("nan")), ("softmax_scale", float("inf")), ("softmax_scale", torch.tensor(float("nan"))),
    ("softmax_scale", torch.ones(2)), ("softmax_scale", "0.5"), ("softmax_scale", 1j), ("softmax_scale", [0.5]),
    ("softcap", float("nan")), ("softcap", float("inf")), ("softcap", -1.0), ("softcap", None),
    ("softcap", torch.ones(2)),
])  # fmt: skip
def test_what_is_no_number_is_refused_each_time(call, option, value):
    x = torch.randn(TOTAL, 2, 8)
    for _ in range(2):
        with pytest.raises(ContractError, match=f"{option} is .*give"):
            call(x, **{option: value})


def test_a_scale_of_zero_weighs_all_keys_alike(call):
    x = torch.randn(TOTAL, 2, 8, dtype=torch.float64)
    want = x.cumsum(0) / torch.arange(1, TOTAL + 1)[:, None, None]
    torch.testing.assert_close(call(x, softmax_scale=0.0), want)


def test_other_options_of_flex_flash_attn_func():
    x = torch.randn(TOTAL, 2, 8)
    plain = (x, x, x, RANGES, RANGES, TYPES)
    want = api.flex_flash_attn_func(*plain)[0]
    for given in (torch.tensor(3), np.int32(3), 3):
        assert torch.equal(api.flex_flash_attn_func(*plain, sm_margin=given)[0], want)
    for given in (torch.tensor(True), np.bool_(True), 1):
        out, meta = api.flex_flash_attn_func(*plain, deterministic=given, return_max_logits=given)
        assert torch.equal(out, want) and meta.max_logits.shape == (2,)
    for given in (1.5, torch.tensor(1.5), "2", None, -1):
        with pytest.raises(ContractError, match="sm_margin is .*give"):
            api.flex_flash_attn_func(*plain, sm_margin=given)


def test_rows_are_moved_by_whole_numbers(group):
    key, plan = make_key(group), api.make_plan(Mask.causal(TOTAL), 1)
    x = torch.arange(TOTAL)
    for given in (3, torch.tensor(3), np.int64(3)):
        assert torch.equal(plan.roll(x, given), x.roll(3)) and torch.equal(api.roll(x, given, 0, key), x.roll(3))
    for given in (1.5, torch.tensor(1.0), "1", True):
        for run in (lambda: plan.roll(x, given), lambda: api.roll_simple(x, given, 0, key)):  # noqa: B023
            with pytest.raises(ContractError, match="shift is .*give an integer"):
                run()


def test_pads_are_numbers_that_the_dtype_has():
    total = TOTAL - 1
    plan = api.make_plan(Mask.causal(total), 2)
    big, tokens = 2**62 + 1, torch.zeros(total, dtype=torch.int64)

    for given in (big, torch.tensor(big), np.int64(big)):
        shards = FakeWorld(2).run(lambda t: plan.shard(tokens, t, given))  # noqa: B023
        assert int(torch.cat(shards).max()) == big and plan.pad_size
    for given, problem in ((0.5, "give an integer"), (float("nan"), "give an integer"), (torch.ones(2), "one number"),
                           (torch.ones((), requires_grad=True), "requires a gradient"),
                           (2**63, "int64, which holds -9223372036854775808 to")):  # fmt: skip
        with pytest.raises(ContractError, match=f"pad_value is .*{problem}"):
            FakeWorld(2).run(lambda t: plan.shard(tokens, t, given))  # noqa: B023
    for dtype, given, limits in ((torch.uint8, -100, "0 to 255"), (torch.int8, 128, "-128 to 127"),
                                 (torch.bool, -100, "0 to 1")):  # fmt: skip
        with pytest.raises(ContractError, match=rf"pad_value is {given} .*{limits}; give one of these, or x.long\(\)"):
            FakeWorld(2).run(lambda t: plan.shard(tokens.to(dtype), t, given))  # noqa: B023


def test_plans_of_equal_numbers_are_equal():
    """Ranks compare plans by fingerprint, whatever kind of number made them."""

    def plan(kind):
        overlap = api.OverlapConfig(degree=kind(2), min_chunk_size=kind(8), calc_cost_factor=kind(3))
        config = api.DistAttnConfig(api.DispatchConfig(chunk_size=kind(4)), overlap)
        mask = Mask.causal(kind(TOTAL))
        return api.make_plan(mask, kind(2), config, num_heads_q=kind(4), num_heads_kv=kind(2), head_dim=kind(8))

    plans = [plan(kind) for kind in (int, np.int64, np.int32, torch.tensor)]
    assert len({p.fingerprint for p in plans}) == 1 and len(set(plans)) == 1
    assert all(type(p.cp_size) is type(p.chunk_size) is type(p.total_tokens) is int for p in plans)


@pytest.mark.parametrize("make", [
    lambda x: api.make_plan(Mask.causal(TOTAL), x), lambda x: Mask.causal(x),
    lambda x: api.make_plan(Mask.causal(TOTAL), 1, num_heads_q=x), lambda x: api.DispatchConfig(chunk_size=x),
    lambda x: api.OverlapConfig(degree=x), lambda x: api.OverlapConfig(min_chunk_size=x),
    lambda x: api.GrpCollConfig(num_sms=x), lambda x: Mask.block_causal(8, x),
])  # fmt: skip
@pytest.mark.parametrize("value", [2.5, torch.tensor(2.5), "2", torch.ones(2), torch.nn.Parameter(torch.ones(()))])
def test_counts_are_whole(make, value):
    with pytest.raises(ContractError, match="give an integer|requires a gradient"):
        make(value)


@pytest.mark.parametrize("option, value", [
    ("fwd_sm_margin", -1), ("bwd_sm_margin", 2.5), ("stage_mode", "fuse"), ("dsink_reduce", "mean"),
])  # fmt: skip
def test_policies_are_checked(option, value):
    with pytest.raises(ContractError, match=f"{option} is .*give"):
        api.AttnPolicy(**{option: value})
    assert api.AttnPolicy(fwd_sm_margin=np.int64(4), deterministic=np.bool_(True)) == api.AttnPolicy(
        fwd_sm_margin=4, deterministic=True
    )


def test_counts_of_keys_are_whole(group):
    ranges = AttnRanges.from_ranges([[0, TOTAL]])
    good = (TOTAL, TOTAL, 2, 2, 8)
    key = api.magi_attn_flex_key(ranges, ranges, "causal", *map(np.int64, good), 0, group)
    assert key == api.magi_attn_flex_key(ranges, ranges, "causal", *map(torch.tensor, good), 0, group)
    assert type(key.total_seqlen_q) is type(key.head_dim) is int
    for i in range(len(good)):
        bad = [*good[:i], good[i] + 0.5, *good[i + 1 :]]
        with pytest.raises(ContractError):
            api.magi_attn_flex_key(ranges, ranges, "causal", *bad, 0, group)
