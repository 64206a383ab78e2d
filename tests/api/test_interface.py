# SPDX-License-Identifier: Apache-2.0
"""The published API in one process (a group of one rank): keys, caches, shims, errors."""

from __future__ import annotations

import pytest
import torch

from magi_attention import api
from magi_attention.api import (
    AttnMaskType,
    AttnRanges,
    DispatchConfig,
    DistAttnConfig,
    Mask,
    OverlapConfig,
    attend,
    calc_attn,
    clear_cache,
    dispatch,
    dist_attn_runtime_dict_mgr,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_key,
    magi_attn_varlen_dispatch,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_plan,
    roll,
    undispatch,
)
from magi_attention.testing.ref_attn import ref_attn_func

HEADS = dict(num_heads_q=4, num_heads_kv=2, head_dim=8)


def ranges(*pairs) -> AttnRanges:
    return AttnRanges.from_ranges(list(pairs))


def flex_key(group, total=24, kind="causal", **kwargs):
    values = dict(total_seqlen_q=total, total_seqlen_k=total, **HEADS, pad_size=0, cp_group_or_mesh=group)
    return magi_attn_flex_key(ranges((0, total)), ranges((0, total)), kind, **{**values, **kwargs})


def test_one_rank_end_to_end(group) -> None:
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)
    key = magi_attn_varlen_key(cu, cu, 4, 2, 8, 0, group, causal=True)
    assert (key.pad_size, key.total_seqlen_q, key.num_heads_q, key.num_heads_kv) == (0, 24, 4, 2)
    q, k, v = (torch.randn(24, h, 8, requires_grad=True) for h in (4, 2, 2))
    local = [dispatch(x, key) for x in (q, k, v)]
    out, meta = calc_attn(*local, key, softmax_scale=0.3)
    mask = torch.from_numpy(api.Mask.varlen([0, 10, 24], causal=True).to_dense())
    expected, _ = ref_attn_func(q, k, v, mask, softmax_scale=0.3)
    torch.testing.assert_close(undispatch(out, key), expected, atol=1e-5, rtol=1e-5)
    assert meta.lse.shape == (24, 4) and meta.lse.dtype == torch.float32 and meta.max_logits is None
    assert calc_attn(*local, key, return_max_logits=True)[1].max_logits.shape == (4,)
    assert get_position_ids(key).tolist() == list(range(24))
    assert torch.equal(roll(torch.arange(24), -1, 0, key), torch.arange(24).roll(-1))


def test_varlen_and_flex_keys_are_equal_and_hits_are_most_recent(group) -> None:
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)
    first = magi_attn_varlen_key(cu, cu, 4, 2, 8, 0, group, causal=True)
    types = ["causal", AttnMaskType.CAUSAL]
    same = magi_attn_flex_key(ranges((0, 10), (10, 24)), ranges((0, 10), (10, 24)), types, 24, 24, 4, 2, 8, 0, group)
    assert first == same and hash(first) == hash(same)
    other = flex_key(group, kind="full")
    assert get_most_recent_key(group) == other != first
    magi_attn_varlen_key(cu, cu, 4, 2, 8, 0, group, causal=True)  # a hit
    assert get_most_recent_key(group) == first
    dispatch(torch.arange(24), other)
    assert get_most_recent_key(group) == other
    assert len(dist_attn_runtime_dict_mgr.keys(group)) == 2


def test_keys_are_snapshots(group) -> None:
    q = ranges((0, 24))
    key = magi_attn_flex_key(q, q, "full", 24, 24, 4, 2, 8, 0, group)
    before = hash(key)
    q[0].end = 7
    q.append(api.AttnRanges.from_ranges([(0, 3)])[0])
    assert hash(key) == before and key == flex_key(group, kind="full")


def test_environment_is_read_when_the_key_is_made(group, monkeypatch) -> None:
    plain = flex_key(group)
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
    explicit = flex_key(group)
    assert plain != explicit and plain.kernel_backend.value == "ffa" and explicit.kernel_backend.value == "sdpa"
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")
    q, k = torch.randn(24, 4, 8), torch.randn(24, 2, 8)
    calc_attn(q, k, k, plain)  # the default may fall back
    with pytest.raises(AssertionError, match="ffa"):  # a backend that was asked for by name may not
        calc_attn(q, k, k, flex_key(group))


def test_eviction_spares_held_keys_and_clearing_does_not(group, monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE", "1")
    dist_attn_runtime_dict_mgr._dicts.clear()
    first, second = flex_key(group, kind="full"), flex_key(group)
    assert dist_attn_runtime_dict_mgr.keys(group) == [second]
    assert dispatch(torch.arange(24), first).shape == (24,)
    clear_cache(group)
    with pytest.raises(ValueError, match="clear_cache"):
        dispatch(torch.arange(24), first)
    with pytest.raises(ValueError, match="No dist attn runtime key"):
        get_most_recent_key(group)
    with pytest.raises(ValueError, match="None"):
        get_most_recent_key(None)
    dist_attn_runtime_dict_mgr._dicts.clear()


def test_clearing_leaves_pending_backward_passes_alone(group) -> None:
    key = flex_key(group)
    q, k = torch.randn(24, 4, 8, requires_grad=True), torch.randn(24, 2, 8)
    out, _ = calc_attn(q, k, k, key)
    clear_cache()
    out.sum().backward()
    assert q.grad is not None


def test_a_key_of_another_process_is_unknown(group) -> None:
    key = api.init_dist_attn_runtime_key(
        ranges((0, 8)), ranges((0, 8)), ["full"], 8, 8, 4, 2, 8, 0, 8, group, None, DistAttnConfig()
    )
    with pytest.raises(ValueError, match="does not exist"):
        calc_attn(torch.zeros(8, 4, 8), torch.zeros(8, 2, 8), torch.zeros(8, 2, 8), key)
    with pytest.raises(ValueError, match="for dispatch does not exist"):
        make_flex_key_for_new_mask_after_dispatch(ranges((0, 8)), ranges((0, 8)), "full", key)


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (ValueError, "'causal'", lambda g: flex_key(g, kind="casual")),
        (AssertionError, "2 mask types for 1", lambda g: flex_key(g, kind=["full", "full"])),
        (AssertionError, "beyond the 8", lambda g: flex_key(g, total=24, total_seqlen_q=8, total_seqlen_k=8)),
        (
            ValueError,
            "q_ranges is empty",
            lambda g: magi_attn_flex_key(ranges(), ranges(), "full", 8, 8, 4, 2, 8, 0, g),
        ),
        (
            AssertionError,
            "1 q ranges but 2 k",
            lambda g: magi_attn_flex_key(ranges((0, 8)), ranges((0, 4), (4, 8)), "full", 8, 8, 4, 2, 8, 0, g),
        ),
        (ValueError, "ProcessGroup or a DeviceMesh", lambda g: flex_key("group")),
        (
            ValueError,
            "contradicts",
            lambda g: flex_key(g, chunk_size=4, dist_attn_config=DistAttnConfig(DispatchConfig(8))),
        ),
        (ValueError, "one order", lambda g: flex_key(g, is_q_permutable=False)),
        (NotImplementedError, "self-attention", lambda g: flex_key(g, is_same_source=False)),
        (AssertionError, "self-attention", lambda g: flex_key(g, total_seqlen_k=32)),
        (AssertionError, "multiple of", lambda g: flex_key(g, num_heads_kv=3)),
        (
            AssertionError,
            "causal=False",
            lambda g: magi_attn_varlen_key(
                torch.tensor([0, 8]), torch.tensor([0, 8]), 4, 2, 8, 0, g, causal=True, window_size=(2, 0)
            ),
        ),
        (
            ValueError,
            "must be 0",
            lambda g: magi_attn_varlen_key(torch.tensor([1, 8]), torch.tensor([1, 8]), 4, 2, 8, 0, g),
        ),
        (
            ValueError,
            "decreases",
            lambda g: magi_attn_varlen_key(torch.tensor([0, 8, 4]), torch.tensor([0, 8, 4]), 4, 2, 8, 0, g),
        ),
        (
            ValueError,
            "from_ranges",
            lambda g: magi_attn_flex_key(torch.zeros(4), ranges((0, 4)), "full", 4, 4, 4, 2, 8, 0, g),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_keys_say_what_to_do(group, error, words, make) -> None:
    with pytest.raises(error, match=words):
        make(group)
    assert dist_attn_runtime_dict_mgr.keys(group) == []


def test_overlap_is_named(group) -> None:
    twice = ranges((0, 8), (4, 8)), ranges((0, 8), (6, 7))
    with pytest.raises(ValueError, match="Slices 0 and 1 overlap"):
        magi_attn_flex_key(*twice, "full", 8, 8, 4, 2, 8, 0, group)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(q=torch.zeros(23, 4, 8)), "23 rows"),
        (dict(q=torch.zeros(24, 32)), "local tokens, heads, head dim"),
        (dict(k=torch.zeros(24, 2, 8).double()), "one dtype and device"),
        (dict(k=torch.zeros(24, 3, 8), v=torch.zeros(24, 3, 8)), "do not divide"),
        (dict(v=torch.zeros(24, 1, 8)), "same heads"),
        (dict(k=torch.zeros(24, 2, 9)), "same head dim"),
        (dict(q=torch.zeros(24, 4, 8).int(), k=torch.zeros(24, 2, 8).int(), v=torch.zeros(24, 2, 8).int()), "floating"),
        (dict(q=torch.zeros(24, 4, 8, device="meta")), "one dtype and device"),
        (dict(sink=torch.zeros(2, 3)), "4 query heads"),
    ],
)
def test_bad_tensors_say_what_to_do(group, change, words) -> None:
    key = flex_key(group)
    values = dict(q=torch.zeros(24, 4, 8), k=torch.zeros(24, 2, 8), v=torch.zeros(24, 2, 8), sink=None)
    values.update(change)
    with pytest.raises(ValueError, match=words):
        calc_attn(key=key, **values)


def test_shapes_and_dtypes_on_the_meta_device(group) -> None:
    key, plan = flex_key(group), make_plan(Mask.causal(24), 1)
    for dtype, accumulated in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        q, k, v = (torch.zeros(24, h, d, dtype=dtype, device="meta") for h, d in ((4, 8), (2, 8), (2, 6)))
        for out, meta in (calc_attn(q, k, v, key, return_max_logits=True), attend(q, k, v, plan)):
            assert out.is_meta and out.shape == (24, 4, 6) and out.dtype == dtype
            assert meta.lse.is_meta and meta.lse.shape == (24, 4) and meta.lse.dtype == accumulated
    assert calc_attn(q, k, v, key, return_max_logits=True)[1].max_logits.shape == (4,)


def test_strided_views_work(group) -> None:
    key = flex_key(group)
    packed = torch.randn(24, 8, 8, requires_grad=True)
    strided = calc_attn(packed[:, :4], packed[:, 4:6], packed[:, 6:], key)[0]
    transposed = packed.detach().transpose(0, 1).contiguous().transpose(0, 1)
    plain = calc_attn(*(x.contiguous() for x in (transposed[:, :4], transposed[:, 4:6], transposed[:, 6:])), key)[0]
    assert torch.equal(strided, plain)
    strided.sum().backward()
    assert packed.grad.isfinite().all()


def test_wrong_length_of_dispatched_tensor(group) -> None:
    with pytest.raises(ValueError, match="24 rows"):
        dispatch(torch.zeros(25), flex_key(group))


def test_deprecated_arguments_warn(group) -> None:
    with pytest.warns(DeprecationWarning, match="pad_size"):
        flex_key(group, pad_size=3)
    with pytest.warns(DeprecationWarning, match="DispatchConfig"):
        assert flex_key(group, chunk_size=2).chunk_size == 2
    assert OverlapConfig(enable=False) == OverlapConfig(degree=0)
    cu = torch.tensor([0, 24], dtype=torch.int32)
    with pytest.warns(DeprecationWarning, match="magi_attn_varlen_key"):
        local, key = magi_attn_varlen_dispatch(
            torch.arange(24), cu, cu, head_dim=8, pad_size=0, cp_group=group, causal=True
        )
    assert local.tolist() == list(range(24)) and key.pad_size == 0
    with pytest.warns(DeprecationWarning):
        assert api.full_attention_to_varlen_attention(3, 4)[0].tolist() == [0, 4, 8, 12]
