# SPDX-License-Identifier: Apache-2.0
"""Index attention of tokens that are spread over ranks: each query attends to a list of keys chosen at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from magi_attention.api.compiled.graph_breaks import breaks_graph
from magi_attention.api.plan import Plan, check_plan
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.env import general
from magi_attention.functional.sparse import index_rows
from magi_attention.functional.sparse.index_rows import IndexExchange
from magi_attention.kernels.index_attn import PreparedIndices, with_readers

_eager = breaks_graph("how many rows index attention fetches is known at run time only")


@_eager
def attend_index(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    indices: torch.Tensor | PreparedIndices | IndexExchange,
    plan: Plan,
    group: Any = None,
    *,
    head_dim_v: int | None = None,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    max_rows: int | None = None,
    is_joined: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of this rank's tokens, each to a list of keys of its own, as top-k attention chooses them (DSA).

    q ``(T, Hq, D)``, k ``(T, Hk, D)``, v ``(T, Hk, Dv)`` hold this rank's ``T`` tokens (``plan.shard``). With v None
    and ``head_dim_v`` the first so many columns of k are the values, as in MLA's latents, and travel once.

    ``indices`` is int32 or int64 ``(T, Hk, N)``, made on each rank for its own queries: global positions of keys, which
    may be anywhere, in any order; negative entries are none and a key that is there twice counts once, as of
    ``index_attn_func``. Or lists of blocks, as ``indexer_topk_blocks`` and ``prepare_indices`` (of ``T`` lists) make
    them. Only what is listed is seen: the plan's mask plays no part, its dispatch does. Lists of pad rows are taken as
    empty.

    With ``is_joined`` a token has ``Hk`` keys, and all query heads see, in one softmax, those of each kind that its
    ``Hk`` lists name: with the key of every token beside a compressed one of some tokens, as DeepSeek V4 has it.

    Only rows of k and v (one kv head of one token each) that this rank's lists name are fetched, each once; gradients
    of fetched rows go back to their owners, which add them in rank order: equal bits on every run. ``max_rows`` bounds
    the rows that this rank fetches, each ``(D + Dv) * itemsize`` bytes, and as much again in the backward; by default
    all may come. Layers with the same lists share an ``IndexExchange`` (``prepare_index_exchange``) in place of
    ``indices``; then its ``max_rows`` counts.

    Returns out ``(T, Hq, Dv)`` in q's dtype and ``AttnForwardMeta`` with lse ``(T, Hq)``; rows without keys have out 0
    and lse -inf. ``sink`` is ``(S, Hq)``, the same on all ranks. ``softmax_scale``, ``softcap`` and ``deterministic``
    as of ``index_attn_func``. Gradients of parameters are those of this rank's tokens: sum them over the group, as
    after ``attend``. Collective over the group, forward and backward. In a compiled model it breaks the graph.

    ``ContractError`` on every rank, with nothing sent, if a rank needs more than its ``max_rows``; and for rows that do
    not fit the plan and entries beyond its tokens (on a GPU with ``MAGI_ATTENTION_SANITY_CHECK=1``; without, they are
    none).
    """
    check_plan(plan)
    if deterministic is None:
        deterministic = general.is_deterministic_mode_enable()
    return index_rows.attend_index(
        q, k, v, indices, plan._layout(group), head_dim_v=head_dim_v, sink=sink, softmax_scale=softmax_scale,
        softcap=softcap, deterministic=deterministic, max_rows=max_rows, is_joined=bool(is_joined),
    )  # fmt: skip


@_eager
def prepare_index_exchange(
    indices: torch.Tensor | PreparedIndices, plan: Plan, group: Any = None, *, max_rows: int | None = None,
    is_joined: bool = False, deterministic: bool = False,
) -> IndexExchange:  # fmt: skip
    """Finds out, once for all layers that share them, which rows the lists of ``attend_index`` fetch from whom.

    ``indices``, ``max_rows`` and ``is_joined`` as there, ``indices`` on the device of q; ``deterministic`` as of
    ``prepare_indices``, for calls with ``deterministic=True``. Collective over the group.
    What comes back serves any number of calls, forward and backward, with as many kv heads.
    """
    check_plan(plan)
    exchange = index_rows.make_exchange(indices, plan._layout(group), max_rows, is_joined=bool(is_joined))
    return replace(exchange, lists=with_readers(exchange.lists)) if deterministic else exchange


__all__ = ["IndexExchange", "attend_index", "prepare_index_exchange"]
