# SPDX-License-Identifier: Apache-2.0
"""The published dispatch, undispatch and roll: by meta and group, along any dim, even and uneven, with gradients."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.enum import AttnRole, AttnType
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import dispatch_func, roll_func, roll_simple_func, undispatch_func
from magi_attention.functional.dispatch import dispatch_func as by_module
from magi_attention.functional.roll import roll_p2p, roll_simple_p2p
from magi_attention.meta.collection import DispatchMeta


def metas(seed: int) -> list[DispatchMeta]:
    """One partition, drawn by hand, as every rank has it."""
    draw = random.Random(seed)
    cp, chunk, uneven = draw.choice([1, 2, 3, 4]), draw.randint(1, 5), draw.random() < 0.5
    num = cp * draw.randint(1, 4) + (draw.randint(0, cp - 1) if uneven else 0)
    total = num * chunk - (draw.randint(0, chunk - 1) if uneven else 0)
    order = draw.sample(range(num), num)
    cuts = sorted(draw.sample(range(1, num), cp - 1)) if uneven else range(num // cp, num, num // cp)
    parts = [sorted(part.tolist()) for part in np.split(np.array(order), list(cuts))]
    perm = [c for part in parts for c in part]
    sizes = [min(chunk, total - c * chunk) for c in range(num)]
    lengths = [sum(sizes[c] for c in part) for part in parts]
    return [
        DispatchMeta(
            AttnRole.QUERY,
            AttnType.SELF_ATTN,
            total,
            lengths[rank],
            total,
            chunk,
            num,
            rank,
            cp,
            parts,
            perm,
            np.argsort(perm).tolist(),
            sizes if uneven else None,
            lengths if uneven else None,
        )  # fmt: skip
        for rank in range(cp)
    ]


def rows_of(meta: DispatchMeta, rank: int) -> torch.Tensor:
    total, size = meta.total_seqlen, meta.chunk_size
    return torch.cat([torch.arange(c * size, min(c * size + size, total)) for c in meta.partitions[rank]])


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_dispatch_and_back(seed, dim) -> None:
    print(f"seed {seed}")
    every = metas(seed)
    torch.manual_seed(seed)
    shape = [2, 3, 4]
    shape[dim] = every[0].total_seqlen
    x = torch.randn(shape, dtype=torch.float64)
    weights = [torch.randn(shape, dtype=torch.float64) for _ in every]

    def rank(group):
        meta, mine = every[group.rank], x.clone().requires_grad_()
        local = dispatch_func(mine, group, meta, dim)
        assert torch.equal(local, x.index_select(dim, rows_of(meta, group.rank)))
        whole = undispatch_func(local, meta, group, dim)
        assert torch.equal(whole, x)
        whole.backward(weights[0])
        assert torch.allclose(mine.grad, weights[0]), "the same gradient everywhere comes back whole"
        local = local.detach().requires_grad_()
        undispatch_func(x_local=local, meta=meta, group=group, seq_dim=dim, is_partial_grad=True).backward(
            weights[group.rank]
        )
        assert torch.allclose(local.grad, sum(weights).index_select(dim, rows_of(meta, group.rank)))
        return True

    assert all(FakeWorld(len(every)).run(rank))


@pytest.mark.parametrize("seed", range(24))
def test_rolls(seed) -> None:
    print(f"seed {seed}")
    every = metas(seed)
    draw = random.Random(seed)
    total, size = every[0].total_seqlen, every[0].chunk_size
    shift = draw.choice([0, 1, -1, size, -2 * size, total, total + 3, draw.randint(-3 * total, 3 * total)])
    dim = draw.choice([0, 1])
    torch.manual_seed(seed)
    shape = (3, total) if dim else (total, 3)
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    def rank(group):
        meta, rows = every[group.rank], rows_of(every[group.rank], group.rank)
        local = x.index_select(dim, rows).requires_grad_()
        rolled = roll_func(local, shift, meta, group, dim)
        assert torch.equal(rolled, x.roll(shift, dim).index_select(dim, rows))
        rolled.backward(weight.index_select(dim, rows))
        assert torch.equal(local.grad, weight.roll(-shift, dim).index_select(dim, rows))
        return True

    assert all(FakeWorld(len(every)).run(rank))


def test_names_of_the_published_modules() -> None:
    assert by_module is dispatch_func
    assert roll_func is roll_p2p is roll_simple_func is roll_simple_p2p


def test_mistakes() -> None:
    (meta,) = [m for m in (metas(seed)[0] for seed in range(30)) if m.cp_size == 1][:1]
    x = torch.zeros(meta.total_seqlen)
    dispatch_func(x, None, meta)
    with pytest.raises(ContractError, match="rows along dim 0"):
        dispatch_func(x[:-1], None, meta)
    with pytest.raises(ContractError, match="rank"):
        dispatch_func(x, None, metas(1)[-1] if metas(1)[-1].cp_rank else metas(2)[-1])
    meta.attn_type = AttnType.CROSS_ATTN
    with pytest.raises(UnsupportedError, match="self-attention"):
        dispatch_func(x, None, meta)
    unsorted = next(m for m in (metas(seed)[0] for seed in range(50)) if m.cp_size == 1 and m.num_chunks > 1)
    unsorted.partitions = [unsorted.partitions[0][::-1]]
    with pytest.raises(UnsupportedError, match="ascending"):
        dispatch_func(torch.zeros(unsorted.total_seqlen), None, unsorted)
