# SPDX-License-Identifier: Apache-2.0
"""Attention and the indexer's loss by the same prepared lists, which keep their inverted ones for both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from magi_attention.api import index_attn_func, indexer_kl, prepare_indices
from magi_attention.errors import ContractError
from magi_attention.functional.sparse import index_attn, indexer

F64 = torch.float64


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["no checkpoint", "checkpoint", "reentrant"])
def test_attention_and_loss_keep_one_inversion(use_reentrant, monkeypatch):
    """Plain torch computes here, and is given the lists that kernels ask for. Gradients are those of plain lists."""
    monkeypatch.setattr(index_attn, "has_kernel", lambda *_: True)
    kernels = SimpleNamespace(library_for=lambda *_: "kernels", is_deterministic=lambda: True)
    monkeypatch.setattr(indexer, "kl_hopper", kernels)
    gen = torch.Generator().manual_seed(5)
    indexers = [torch.randn(*shape, dtype=F64, generator=gen) for shape in ((12, 2, 4), (12, 4), (12, 2))]
    q, k = (torch.randn(12, heads, 8, dtype=F64, generator=gen) for heads in (4, 1))
    leaves = *indexers, q, k
    indices = torch.randint(-3, 12, (12, 5), generator=gen)

    def layer(lists, listed, *of):
        out, meta = index_attn_func(*of[3:], of[4], lists, deterministic=True)
        return out.sum() + indexer_kl(*of, meta.lse, listed).sum()

    def gradients(lists, listed):
        of = [x.detach().requires_grad_() for x in leaves]
        if use_reentrant is None:
            loss = layer(lists, listed, *of)
        else:
            loss = checkpoint(layer, lists, listed, *of, use_reentrant=use_reentrant)
        loss.backward()
        return [x.grad for x in of]

    want = gradients(indices[:, None], indices)
    lists = prepare_indices(indices[:, None], 12)
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(gradients(lists, lists), want))
    assert lists.kept.made == 1
    lists.rows[0] = torch.tensor([1, 4, -1, -1, -1])
    lists.counts[0] = 2
    indices[0] = torch.tensor([4, -1, 1, 1, -2])
    edited = gradients(lists, lists)
    assert lists.kept.made == 2
    assert all(torch.equal(*pair) for pair in zip(edited, gradients(indices[:, None], indices)))


def test_prepared_lists_that_do_not_fit_the_loss():
    tensors = [torch.ones(shape) for shape in ((12, 2, 4), (12, 4), (12, 2), (12, 2, 8), (12, 1, 8))]
    for lists in (
        prepare_indices(torch.zeros((12, 2, 3), dtype=torch.int64), 12),
        prepare_indices(torch.zeros((12, 1, 3), dtype=torch.int64), 11),
        prepare_indices(torch.zeros((12, 1, 3), dtype=torch.int64), 12, k_block_size=2),
    ):
        with pytest.raises(ContractError, match=r"give prepare_indices\(indices\[:, None\], 12\)"):
            indexer_kl(*tensors, torch.zeros(12, 2), lists)
