# SPDX-License-Identifier: Apache-2.0
"""The indexer of DSA: the best keys of each query, and the loss by which the indexer learns to find them."""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.api.compiled.graph_breaks import breaks_graph
from magi_attention.api.index_attn import IndexExchange
from magi_attention.api.plan import Plan, check_plan
from magi_attention.errors import ContractError
from magi_attention.functional.sparse import indexer, indexer_rows
from magi_attention.kernels.index_attn import PreparedIndices, with_readers


def indexer_topk(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    k: int,
    *,
    causal: bool = True,
    positions: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ``k`` keys of each query that the lightning indexer scores highest, for ``index_attn_func``.

    The score of query t and key s is ``sum_h weights[t, h] * relu(q_index[t, h] . k_index[s])``. q_index ``(T, H, D)``
    and k_index ``(S, D)`` have one floating dtype, weights ``(T, H)`` any. Scores are to be finite.

    A query sees what all of these let it see: with ``causal`` keys up to its own position; with ``cu_seqlens``
    ``[0, n0, n0 + n1, ..., S]`` those of its own document; keys from ``k_start`` to below ``k_end``, int32 or int64
    ``(T,)``. ``positions`` int32 or int64 ``(T,)`` says where queries stand among the keys, by default as they are
    numbered. Over ranks give ``plan.gather`` of the index keys and ``plan.positions()``.

    Returns int32 ``(T, k)``: keys ascending, then -1 where a query sees fewer than ``k``. Where scores are equal the
    lower position wins. The lists are the same for any number of ranks. No gradient goes through it. It never holds
    T x S numbers. Under ``torch.compile(fullgraph=True)`` it is one custom op.

    Hopper GPUs have kernels for 16-bit inputs, up to 64 heads of 128 columns and ``k`` to 4,096. They add dots and
    heads in float32, and the host waits only for ``cu_seqlens`` on the GPU. Else plain PyTorch adds dots in float64,
    rounds them to float32 and adds heads (float64 inputs keep float64), and the host waits for a GPU once.

    ``ContractError`` for tensors that do not fit together, and where positions are needed and are not given.
    """
    visible = indexer.make_visible(causal, positions, cu_seqlens, k_start, k_end)
    return indexer.indexer_topk(q_index, k_index, weights, k, visible)


def indexer_topk_blocks(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor | None,
    k: int,
    k_block_size: int,
    *,
    local_blocks: int = 0,
    causal: bool = True,
    positions: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    deterministic: bool = False,
) -> PreparedIndices:
    """The ``k`` blocks of keys that hold the highest scores of a query, for ``index_attn_func`` and ``attend_index``.

    Without weights each index head chooses for a kv head of attention, by ``q_index[t, h] . k_index[s]`` (MSA); give as
    many index heads as attention has kv heads. With weights ``(T, H)`` all index heads choose together, by the score of
    ``indexer_topk``, for attention with one kv head. A block counts as its best key that the query sees. The last
    ``local_blocks`` blocks that it sees, ``k`` or fewer, are chosen first: with ``causal`` its own and those before it.

    Blocks of ``k_block_size`` keys are counted from the first key that a query sees, so documents choose as if alone.
    Arguments after the star and the order of equal scores are as of ``indexer_topk``. It never holds T x S numbers. No
    gradient goes through it. Under ``torch.compile(fullgraph=True)`` it is one custom op.

    Hopper GPUs have kernels for 16-bit inputs, up to 64 heads of 128 columns, ``k`` to 4,096 and blocks of any size,
    with the arithmetic of ``indexer_topk`` there and elsewhere. They hold the scores of blocks, and not of keys, of
    some queries at a time: 256 MiB. Plain PyTorch holds those of 64 queries.

    ``deterministic``: as of ``prepare_indices``, for attention with ``deterministic=True``; one custom op more.

    Returns lists of blocks, ``rows`` int32 ``(T, lists, k)``, by which a query sees those keys of a block that its
    masks let it see.

    ``ContractError`` as of ``indexer_topk``.
    """
    visible = indexer.make_visible(causal, positions, cu_seqlens, k_start, k_end)
    lists = indexer.indexer_topk_blocks(q_index, k_index, weights, k, k_block_size, local_blocks, visible)
    return with_readers(lists) if deterministic else lists


def indexer_kl(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor | PreparedIndices | IndexExchange | None = None,
    plan: Plan | None = None,
    group: Any = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    positions: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """The KL divergence of each query from attention's probabilities to the softmax of the indexer's scores.

    As in the report of DeepSeek-V3.2 (arXiv 2512.02556): the target is the sum of attention's
    probabilities over heads, divided by its sum over keys, and the divergence is
    ``sum_s target_s * (log target_s - log_softmax(scores)_s)``. With ``indices`` int32 or int64 ``(T, N)``, made by
    ``indexer_topk`` and shared by all heads, both are over these keys (sparse training); or give what
    ``prepare_indices(indices[:, None], S)`` made for attention, so that nothing is sorted again. Without, over all keys
    that the masks of ``indexer_topk`` let a query see (dense warm-up); give those of attention.

    q_index, k_index and weights as there. q ``(T, Hq, Dq)``, k ``(S, Hk, Dq)`` (MLA: one kv head) and lse ``(T, Hq)``
    are those of attention, with its ``softmax_scale`` (by default ``Dq ** -0.5``) and ``softcap``; they are constants
    here.

    With ``plan`` all tensors hold this rank's tokens (``plan.shard``), k_index and k too, and ``positions`` are those
    of the plan by default. The call is collective over the group. With ``indices``, global positions of keys as of
    ``attend_index``, the rows that they name are fetched; or give the ``IndexExchange`` of ``indices[:, None]``, which
    ``attend_index`` of one kv head takes, too. Without ``indices`` all keys are gathered. Gradients of k_index go back
    to the owners of its rows. Add up the divergences of all ranks.

    Returns ``(T,)`` in float32 (float64 for float64 inputs), 0 where lse is -inf, as of pad rows, or no key is visible;
    the report's loss is its sum. Gradients of q_index, k_index and weights are computed block by block, and neither
    pass holds T x S or T x N x D numbers. Under ``torch.compile(fullgraph=True)`` it is one custom op, and one more
    that prepares lists; with ``plan`` it breaks the graph.

    On Hopper GPUs kernels take 16-bit inputs of one dtype with ``indices`` and no softcap, of up to 64 index heads of
    128 columns, and attention of up to 128 heads on one kv head of 576 columns, or on several. The forward then leaves
    ``4 * T * N`` bytes for the backward, and as many of lists that it had to prepare. What queries add to the gradient
    of k_index is added in any order there, and in a fixed one under ``torch.use_deterministic_algorithms(True)`` or
    ``MAGI_ATTENTION_DETERMINISTIC_MODE=1``, set for both passes, which takes up to 1.2 GB and the inverted lists,
    ``4 * (T * N + S)`` bytes. Prepared lists and exchanges keep these for attention and for later calls; of a tensor
    each call makes them, and they live until its backward. All else has the same bits on every run. Plain PyTorch
    computes all other problems, on any device.

    ``ContractError`` for tensors that do not fit together, for lists and masks in one call, and for entries beyond the
    keys (on a GPU these are none).
    """
    masks = causal, positions, cu_seqlens, k_start, k_end
    of = q_index, k_index, weights, q, k, lse
    if plan is not None:
        return _of_ranks(*of, indices, masks, softmax_scale, softcap, plan, group)
    if isinstance(indices, IndexExchange):
        raise ContractError("indices= are an IndexExchange, which is for the ranks of a plan; give plan=, too.")
    return indexer.indexer_kl(*of, indices, indexer.make_visible(*masks), softmax_scale, softcap)


@breaks_graph("how many rows of index attention travel is known at run time only")
def _of_ranks(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    lse: torch.Tensor, indices: torch.Tensor | IndexExchange | None, masks: tuple[Any, ...],
    softmax_scale: float | None, softcap: float, plan: Plan, group: Any,
) -> torch.Tensor:  # fmt: skip
    check_plan(plan)
    visible = indexer.make_visible(*masks)
    if indices is None and visible.positions is None:
        visible = visible._replace(positions=plan.positions(group, q.device))
    return indexer_rows.indexer_kl(
        q_index, k_index, weights, q, k, lse, indices, visible, softmax_scale, softcap, plan._layout(group)
    )
