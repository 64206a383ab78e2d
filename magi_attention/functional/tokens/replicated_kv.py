# SPDX-License-Identifier: Apache-2.0
"""Which keys the rows of a rank see where queries are spread by a plan and every rank holds all keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from magi_attention.common.infer import CuSeqlens, as_cu_seqlens
from magi_attention.common.intervals import Packing, split_at
from magi_attention.common.plan_cache import Kind
from magi_attention.errors import ContractError
from magi_attention.functional.tokens.layout import TokenLayout


class _Made(NamedTuple):
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    ranges: torch.Tensor


_RANGES: Kind[None, _Made] = Kind("ranges of replicated keys")


def replicated_ranges(
    layout: TokenLayout, cu_seqlens_q: CuSeqlens | None, cu_seqlens_k: CuSeqlens, q_rows: int, k_rows: int
) -> torch.Tensor:
    """int32 ``(N, 4)`` on the CPU: local rows ``[a, b)`` of this rank see rows ``[c, d)`` of the keys.

    Query document i of ``cu_seqlens_q``, by default the plan's own, sees key document i. Pad rows are in no range. The
    result for the last ``cu_seqlens`` is kept. ``ContractError`` unless they fit the plan, ``q_rows`` and ``k_rows``.
    """
    cu_q, cu_k = _documents(layout, cu_seqlens_q), as_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
    _check(layout, cu_q, cu_k, q_rows, k_rows)
    key = tuple(cu_q.tolist()), tuple(cu_k.tolist())
    found = layout.cache.find(_RANGES, None)
    if found is None or found[:2] != key:
        layout.cache.pop(_RANGES, None)  # a plan may outlive any number of prompts
        made = _Made(*key, _ranges(layout, cu_q, cu_k))
        layout.cache.get(_RANGES, None, lambda: made)
        return made.ranges
    return found.ranges


def _documents(layout: TokenLayout, cu_seqlens_q: CuSeqlens | None) -> np.ndarray:
    known = layout.plan.cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    if known is None:
        raise ContractError(
            "The mask of this plan does not know its documents, so there is nothing to match the keys with. Give "
            "cu_seqlens_q=[0, n0, n0 + n1, ...] of the whole sequence; [0, total] is one document."
        )
    return as_cu_seqlens(known, "cu_seqlens_q")


def _check(layout: TokenLayout, cu_q: np.ndarray, cu_k: np.ndarray, q_rows: int, k_rows: int) -> None:
    plan = layout.plan
    if q_rows != layout.num_local:
        raise ContractError(
            f"q has {q_rows} rows, and rank {layout.rank} holds {layout.num_local} of {plan.total_tokens} tokens "
            f"(+{plan.pad_size} pad); give the rows of plan.shard."
        )
    if cu_q[-1] != plan.total_tokens:
        raise ContractError(
            f"cu_seqlens_q end at {cu_q[-1]}, but the plan has {plan.total_tokens} tokens; describe the whole "
            "sequence, without the pad that a plan adds."
        )
    if cu_k[-1] != k_rows:
        raise ContractError(
            f"cu_seqlens_k end at {cu_k[-1]}, but k has {k_rows} rows; every rank gives all keys, and cu_seqlens_k "
            "describe all of them."
        )
    if len(cu_q) != len(cu_k):
        raise ContractError(
            f"There are {len(cu_q) - 1} query documents and {len(cu_k) - 1} key documents; give one key document for "
            "each. A plan leaves empty documents out: give cu_seqlens_q if there are any."
        )


def _ranges(layout: TokenLayout, cu_q: np.ndarray, cu_k: np.ndarray) -> torch.Tensor:
    host = Packing(layout.plan.host_ranges(layout.rank))
    pieces = split_at(host.ranges, cu_q)
    pieces = pieces[pieces[:, 0] < cu_q[-1]]  # without pad rows
    document = np.searchsorted(cu_q, pieces[:, 0], side="right") - 1
    found = np.stack([*host.localize(pieces).T, cu_k[document], cu_k[document + 1]], axis=1)
    return torch.from_numpy(found.astype(np.int32))
