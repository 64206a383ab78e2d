# SPDX-License-Identifier: Apache-2.0
"""``MAGI_ATTENTION_PROFILE_MODE=1``: named intervals of ``flex_flash_attn_func``, read by the published functions."""

from __future__ import annotations

import pytest
import torch

from magi_attention import magi_attn_ext
from magi_attention.errors import ContractError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func

FORWARD = ("fwd_prepare", "fwd_run", "fwd_cast")
BACKWARD = ("bwd_prepare", "bwd_run", "bwd_cast")
APART_ELSEWHERE = {"fwd_range_merge": "fwd_run", "bwd_preprocess": "bwd_run"}


@pytest.fixture(autouse=True)
def no_events():
    magi_attn_ext.destroy_event()
    yield
    magi_attn_ext.destroy_event()


def call() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    ranges = torch.tensor([[0, 40], [40, 64]], dtype=torch.int32)
    out, meta = flex_flash_attn_func(q, k, v, ranges, ranges, torch.tensor([1, 0], dtype=torch.int32))
    out.square().sum().backward()
    return [out, meta.lse, q.grad, k.grad, v.grad]


def test_profile_mode_times_the_steps_and_changes_no_result(monkeypatch):
    monkeypatch.delenv("MAGI_ATTENTION_PROFILE_MODE", raising=False)
    plain = call()
    for name in (*FORWARD, *BACKWARD):
        with pytest.raises(ContractError, match="was not stopped"):
            magi_attn_ext.elapsed_ms_event(name)
    monkeypatch.setenv("MAGI_ATTENTION_PROFILE_MODE", "1")
    timed = call()
    assert all(torch.equal(a, b) for a, b in zip(plain, timed))
    times = {name: magi_attn_ext.elapsed_ms_event(name) for name in (*FORWARD, *BACKWARD)}
    assert min(times.values()) >= 0 and times["fwd_run"] > times["fwd_cast"]
    magi_attn_ext.destroy_event("fwd_run")
    with pytest.raises(ContractError, match="fwd_run"):
        magi_attn_ext.elapsed_ms_event("fwd_run")


@pytest.mark.parametrize(("name", "holder"), APART_ELSEWHERE.items())
def test_steps_that_are_not_apart_say_where_they_are(name, holder, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_PROFILE_MODE", "1")
    call()
    with pytest.raises(ContractError, match=f"'{holder}' holds it"):
        magi_attn_ext.elapsed_ms_event(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu_are_timed_and_again_by_the_short_way_without(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_PROFILE_MODE", "1")
    q, k, v = (torch.randn(4096, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    ranges = torch.tensor([[0, 4096]], dtype=torch.int32, device="cuda")
    for _ in range(3):
        flex_flash_attn_func(q, k, v, ranges, ranges)
        assert magi_attn_ext.elapsed_ms_event("fwd_run") > 0
        magi_attn_ext.destroy_event()
    monkeypatch.delenv("MAGI_ATTENTION_PROFILE_MODE")
    flex_flash_attn_func(q, k, v, ranges, ranges)
    with pytest.raises(ContractError, match="was not stopped"):
        magi_attn_ext.elapsed_ms_event("fwd_run")
