# SPDX-License-Identifier: Apache-2.0
"""The loss of an indexer over a context-parallel group. With lists only the rows that they name travel."""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError
from magi_attention.functional.sparse import indexer
from magi_attention.functional.sparse.index_rows import IndexExchange, fetch_rows, make_exchange
from magi_attention.functional.tokens import layout as token_layout
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.kernels.indexer import Visible


def indexer_kl(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, indices: torch.Tensor | IndexExchange | None, visible: Visible, softmax_scale: float | None,
    softcap: float, layout: TokenLayout,
) -> torch.Tensor:  # fmt: skip
    """``api.indexer_kl`` with the layout of a plan."""
    with layout.transport.guard("indexer, input check"):
        _check(q_index, k_index, q, k, indices, layout)
    if indices is None:
        keys, k_index = token_layout.gather(k.detach(), layout), token_layout.gather(k_index, layout, True)
        return indexer.indexer_kl(
            q_index, k_index, weights, q, keys, lse, None, visible, softmax_scale, softcap
        )  # fmt: skip
    with layout.transport.guard("indexer, input check"):
        indexer.refuse_masks(visible)
    if not isinstance(indices, IndexExchange):
        indices = make_exchange(indices[:, None].to(q.device), layout)
    # one message for both where they have one dtype; a token is one row, whatever its kv heads are
    rows, k_rows = k_index[:, None], k.detach().flatten(1)[:, None]
    if k.dtype == k_index.dtype:
        rows, k_rows = fetch_rows(indices, layout, rows, k_rows)
    else:
        (rows,), (k_rows,) = fetch_rows(indices, layout, rows), fetch_rows(indices, layout, k_rows)
    return indexer.indexer_kl(
        q_index, rows[:, 0], weights, q, k_rows.view(-1, *k.shape[1:]), lse, indices.lists,
        Visible(True, None, None, None, None), softmax_scale, softcap,
    )  # fmt: skip


def _check(
    q_index: torch.Tensor, k_index: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    indices: torch.Tensor | IndexExchange | None, layout: TokenLayout,
) -> None:  # fmt: skip
    for name, x in (("q_index", q_index), ("k_index", k_index), ("q", q), ("k", k)):
        layout.check_rows(x, 0, layout.num_local, f"indexer_kl, {name}")
    if isinstance(indices, IndexExchange):
        if indices.num_heads_kv != 1 or len(indices.lists.rows) != layout.num_local:
            raise ContractError(
                f"The exchange is for {indices.num_heads_kv} kv heads and {len(indices.lists.rows)} rows of this rank; "
                "all heads share the indexer's lists, so give prepare_index_exchange(indices[:, None], plan)."
            )
    elif indices is not None:
        indexer.check_lists(indices, layout.num_local)
