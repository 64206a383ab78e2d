# SPDX-License-Identifier: Apache-2.0
"""Problems of ``block_sparse_attn_func`` on a Hopper GPU.

A case is tokens, keys, query heads, kv heads, head dims of q and of v, sizes of query and key blocks, share of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from magi_attention.kernels.index_attn.choice import default_backends
from magi_attention.native.families import SM90
from magi_attention.native.index.calls import IndexLibrary, bound_library

DEVICE = "cuda"
NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() not in SM90.capabilities,
        reason="The kernels of index attention run on GPUs of compute capability 9.0.",
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16


def draw_rows(case: tuple, dtype: torch.dtype, gen: torch.Generator) -> list[torch.Tensor]:
    """q, k, v, dout."""
    tokens, keys, heads_q, heads_kv, dim, dim_v = case[:6]
    shapes = ((tokens, heads_q, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (tokens, heads_q, dim_v))
    return [torch.randn(s, generator=gen, device=DEVICE).to(dtype) for s in shapes]


def draw_blocks(case: tuple, gen: torch.Generator) -> torch.Tensor:
    tokens, keys, _, heads_kv, _, _, q_block, k_block, share = case
    shape = heads_kv, -(-tokens // q_block), -(-keys // k_block)
    return torch.rand(shape, generator=gen, device=DEVICE) < share


@contextmanager
def noted_launches(
    monkeypatch: pytest.MonkeyPatch, entry: str, params: type, note: Callable[[Any], object]
) -> Iterator[None]:
    """``note`` gets the parameters of each launch by ``entry`` of ``IndexLibrary``, which is bound anew."""
    bind = IndexLibrary._bind

    def bind_noted(self: IndexLibrary) -> None:
        bind(self)
        raw = getattr(self, entry)

        def run(given: bytes) -> int:
            note(params.from_buffer_copy(given))
            return raw(given)

        setattr(self, entry, run)

    monkeypatch.setattr(IndexLibrary, "_bind", bind_noted)
    _forget_calls()
    yield
    _forget_calls()


def _forget_calls() -> None:
    """Neither a prepared call nor the bound library is kept, so that the next call binds and prepares anew."""
    default_backends.cache_clear()
    bound_library.cache_clear()
