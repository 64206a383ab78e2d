# SPDX-License-Identifier: Apache-2.0
"""What is kept of cu_seqlens between the layers of a batch: read once, and never what they were before."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from test_megatron_padded import HEAD_DIM, HEADS, KV_HEADS, make  # noqa: E402

from magi_attention.integrations.shared import thd_documents  # noqa: E402
from magi_attention.integrations.shared.thd_documents import DocumentCache  # noqa: E402


def cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pack(q: torch.Tensor, padded: torch.Tensor | None = None) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=q, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
    )


def set_anew(packed: PackedSeqParams) -> PackedSeqParams:
    packed.cu_seqlens_q = packed.cu_seqlens_kv = cu(0, 8)
    return packed


def write_in_place(packed: PackedSeqParams) -> PackedSeqParams:
    packed.cu_seqlens_q.copy_(cu(0, 8, 8))
    return packed


def write_through_a_view(packed: PackedSeqParams) -> PackedSeqParams:
    packed.cu_seqlens_q[1:2] += 4
    return packed


def copy_and_set(packed: PackedSeqParams) -> PackedSeqParams:
    return set_anew(copy.copy(packed))


@pytest.mark.parametrize("change", (set_anew, write_in_place, write_through_a_view, copy_and_set))
def test_changed_params_are_read_anew(change):
    core = make(AttnMaskType.causal)
    q, k, v = (torch.randn(8, n, HEAD_DIM, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS))
    want = core(q, k, v, None, packed_seq_params=pack(cu(0, 8)))
    packed = pack(cu(0, 4, 8))
    before = core(q, k, v, None, packed_seq_params=packed)
    assert not torch.allclose(before, want)
    assert torch.equal(core(q, k, v, None, packed_seq_params=change(packed)), want)


def test_each_of_the_tensors_counts():
    cache, packed = DocumentCache(), pack(cu(0, 3, 8), cu(0, 4, 12))
    assert cache.read(packed)[:2] == ((0, 4, 12), (3, 5))
    packed.cu_seqlens_q[1] = 2
    assert cache.read(packed)[:2] == ((0, 4, 12), (2, 6))
    packed.cu_seqlens_q_padded += cu(0, 4, 4)
    assert cache.read(packed)[:2] == ((0, 8, 16), (2, 6))
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = None
    assert cache.read(packed)[:2] == ((0, 2, 8), None)


def test_layers_of_a_batch_read_it_once(monkeypatch):
    reads, read = [], thd_documents.as_cu_seqlens

    def count(value, name):
        reads.append(name)
        return read(value, name)

    monkeypatch.setattr(thd_documents, "as_cu_seqlens", count)
    q, k, v = (torch.randn(12, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    layers, packed = [make(AttnMaskType.padding_causal) for _ in range(3)], pack(cu(0, 3, 8), cu(0, 4, 12))
    for core in layers:
        core(q, k, v, None, packed_seq_params=packed)
        core(q, k, v, None, packed_seq_params=copy.copy(packed))  # the same tensors
    assert reads == ["cu_seqlens_q", "cu_seqlens_q_padded"]  # those of the keys are the same objects


@pytest.mark.parametrize("seed", range(3))
def test_a_new_tensor_in_the_place_of_an_old_one(seed):
    """Python gives ids again."""
    rng, cache, ids = np.random.default_rng(seed), DocumentCache(), set()
    for _ in range(300):
        bounds = (0, *rng.integers(1, 50, 3).cumsum().tolist())
        tensor = cu(*bounds)
        ids.add(id(tensor))
        assert cache.read(pack(tensor)).bounds == bounds, seed
    assert len(ids) < 300


def test_the_cache_is_bounded_and_keeps_no_tensor():
    cache, alive = DocumentCache(capacity=4), [cu(0, n) for n in range(1, 11)]
    for tensor in alive:
        cache.read(pack(tensor))
    assert len(cache._found) == 4
    refs = [weakref.ref(tensor) for tensor in alive]
    del alive, tensor
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_tensors_without_a_version_are_read_each_time():
    with torch.inference_mode():
        tensor = cu(0, 4, 8)
        cache, packed = DocumentCache(), pack(tensor)
        assert cache.read(packed).bounds == (0, 4, 8)
        tensor.copy_(cu(0, 2, 8))
        assert cache.read(packed).bounds == (0, 2, 8)
