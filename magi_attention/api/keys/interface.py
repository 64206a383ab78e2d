# SPDX-License-Identifier: Apache-2.0
"""The published functions: keys, dispatch, attention. A thin layer over plans and the runtime.

Keys are made without communication, so ranks need not make them in step; what they must do in step is call
``calc_attn``, ``undispatch`` and ``roll``. Only the first key of a group asks the other ranks for their nodes, where
hierarchical communication is on and no mesh says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from magi_attention.api.compiled.handles import NO_FACTS, CompiledFacts, facts_of_manager, forget_plans
from magi_attention.api.compiled.ops import compiled_attn
from magi_attention.api.compiled.rows import (
    compiled_gather,
    compiled_labels,
    compiled_positions,
    compiled_roll,
    compiled_shard,
)
from magi_attention.api.keys.dispatch_meta import check_source_flags, slice_table
from magi_attention.api.keys.helpers import apply_padding, infer_attn_mask_from_cu_seqlens
from magi_attention.api.keys.key import (
    DistAttnRuntimeKey,
    check_ranges,
    init_dist_attn_runtime_key,
    normalize_types,
    resolve_group,
    with_chunk_size,
)
from magi_attention.api.keys.manager import DistAttnRuntimeDictManager, RuntimeManager
from magi_attention.api.planning.balance_hint import advise_balance, advise_other_mask
from magi_attention.api.planning.group_nodes import with_nodes
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.common.ranges import AttnRanges
from magi_attention.config import DistAttnConfig
from magi_attention.env.snapshot import RuntimeFlags
from magi_attention.errors import ContractError, UnknownKeyError
from magi_attention.functional.calls.attention_check import note_call
from magi_attention.functional.calls.on_meta import are_on_meta, attention_on_meta
from magi_attention.functional.tokens import documents
from magi_attention.functional.tokens import layout as token_layout
from magi_attention.meta import chunking
from magi_attention.meta.chunking import resolve_chunk_size
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan, check_heads, plan_for_partitions

GeneralAttnMaskType = str | AttnMaskType | Sequence[str] | Sequence[AttnMaskType]
_MISSING = "The dist attn runtime key does not exist!"

dist_attn_runtime_dict_mgr = DistAttnRuntimeDictManager()


# ---- making keys ------------------------------------------------------------------------------------


def magi_attn_flex_key(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: Any,
    dist_attn_config: DistAttnConfig | None = None,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """Plans a mask given as slices and returns the key that the other functions take.

    Slice i lets rows ``q_ranges[i]`` see keys ``k_ranges[i]`` under ``attn_mask_type`` (one for all, or one each:
    "full", "causal", "inv_causal", "bi_causal" or the enum), in unpadded coordinates; slices must be disjoint.
    The group is a process group or a 1-D or 2-D device mesh. ``pad_size`` and ``chunk_size`` are deprecated: padding is
    computed, the chunk size belongs into ``DispatchConfig`` and is an upper bound. Errors: ``ValueError`` (unknown
    type, empty or overlapping slices, conflicting chunk sizes), ``AssertionError`` (ranges beyond the totals, unequal
    lengths), ``NotImplementedError`` (cross-attention flags).
    """
    check_ranges(q_ranges, k_ranges)
    config = with_chunk_size(dist_attn_config or DistAttnConfig(), chunk_size, pad_size)
    check_source_flags(is_same_source, is_q_permutable, is_k_permutable)
    types = normalize_types(attn_mask_type, len(q_ranges))
    if total_seqlen_q != total_seqlen_k:
        raise ContractError(
            f"total_seqlen_q {total_seqlen_q} != total_seqlen_k {total_seqlen_k}; only self-attention is distributed."
        )
    flags = RuntimeFlags.from_env()
    group, mesh = resolve_group(cp_group_or_mesh, flags)
    config = with_nodes(config, group, mesh, flags)
    check_heads(num_heads_q, num_heads_kv, head_dim)
    mask = Mask(slice_table(q_ranges, k_ranges, types), total_seqlen_q, total_seqlen_k)
    cp_size, uneven = as_transport(group).size, config.dispatch_config.uneven_shard
    chunk = resolve_chunk_size(mask.total_q, cp_size, config.dispatch_config.chunk_size, flags.min_chunks_per_rank)
    pad = chunking.pad_size(mask.total_q, cp_size, chunk, uneven)
    padded = _pad(q_ranges, k_ranges, types, mask.total_q, pad)
    heads = (num_heads_q, num_heads_kv, head_dim)
    totals = (mask.total_q + pad, mask.total_k + pad)
    key = init_dist_attn_runtime_key(*padded, *totals, *heads, pad, chunk, group, mesh, config)

    options, least = PlanOptions(*heads, query_moves=key.flags.query_moves), flags.min_chunks_per_rank
    build = partial(build_plan, mask.slices, mask.total_q, cp_size, options, min_chunks_per_rank=least)

    def make() -> RuntimeManager:
        mask.check()
        plan = build(config=config)
        if as_transport(group).rank == 0:
            advise_balance(plan, config, build)
        return RuntimeManager(plan, group, key.flags, config, mesh)

    return _remember(key, make)


def magi_attn_varlen_key(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: Any,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """Key for packed documents. ``cu_seqlens_*`` are int32 ``[0, n0, n0 + n1, ...]`` on CPU or GPU; a causal window
    is ``window_size=(w, 0)`` with ``causal=False``."""
    q, k, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal=causal, window_size=window_size
    )
    return magi_attn_flex_key(
        q,
        k,
        types,
        total_q,
        total_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        dist_attn_config=dist_attn_config,
        chunk_size=chunk_size,
    )


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: GeneralAttnMaskType,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """Key of another mask over tokens that are already dispatched by ``key_for_dispatch``.

    The dispatch (and so the balance) is that of the old key; heads default to its heads. A new config
    gives its overlap and group-collective parts. ``ValueError`` if the old key was never made or is cleared.
    """
    old = _manager(key_for_dispatch, "The dist attn runtime key for dispatch does not exist!")
    check_ranges(q_ranges, k_ranges)
    types = normalize_types(attn_mask_type, len(q_ranges))
    total = old.plan.total_tokens
    mask = Mask(slice_table(q_ranges, k_ranges, types), total, total)
    config = DistAttnConfig(
        dispatch_config=key_for_dispatch.dist_attn_config.dispatch_config,
        overlap_config=(dist_attn_config or key_for_dispatch.dist_attn_config).overlap_config,
        grpcoll_config=(dist_attn_config or key_for_dispatch.dist_attn_config).grpcoll_config,
    )
    heads = (
        num_heads_q or key_for_dispatch.num_heads_q,
        num_heads_kv or key_for_dispatch.num_heads_kv,
        head_dim or key_for_dispatch.head_dim,
    )
    check_heads(*heads)
    group, mesh = key_for_dispatch.cp_group, key_for_dispatch.cp_mesh
    padded = _pad(q_ranges, k_ranges, types, total, old.plan.pad_size)
    totals = (old.plan.padded_tokens, old.plan.padded_tokens)
    key = init_dist_attn_runtime_key(
        *padded, *totals, *heads, old.plan.pad_size, old.plan.chunk_size, group, mesh, config,
        dispatch_identity=old.plan.partitions,
    )  # fmt: skip

    def make() -> RuntimeManager:
        mask.check()
        plan = plan_for_partitions(
            mask.slices,
            total,
            old.plan.pad_size,
            old.plan.chunk_size,
            old.plan.partitions,
            PlanOptions(*heads, query_moves=key.flags.query_moves),
            overlap=config.overlap_config,
            uneven_shard=old.plan.uneven_shard,
            nodes=old.plan.nodes,
        )
        advise_other_mask(plan)
        return RuntimeManager(plan, group, key.flags, config, mesh)

    return _remember(key, make)


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """``make_flex_key_for_new_mask_after_dispatch`` for packed documents."""
    q, k, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal=causal, window_size=window_size
    )
    old_total = key_for_dispatch.total_seqlen_q - key_for_dispatch.pad_size
    if (total_q, total_k) != (old_total, old_total):
        raise ContractError(
            f"cu_seqlens describe {total_q} queries and {total_k} keys, but the tokens were dispatched as "
            f"{old_total}; describe the same sequence."
        )
    return make_flex_key_for_new_mask_after_dispatch(q, k, types, key_for_dispatch, dist_attn_config=dist_attn_config)


# ---- using keys -------------------------------------------------------------------------------------


def dispatch(x: torch.Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0) -> torch.Tensor:
    """This rank's rows of ``x``: the global tensor (unpadded total in dim 0, any dtype and other dims), the same
    on all ranks. Backward gathers, so that every rank gets the whole global gradient: parameters that made ``x`` count
    once for each rank when gradients are summed, so dispatch token ids rather than embeddings."""
    if is_compiling():
        return compiled_shard(x, _facts(key), pad_value)
    return token_layout.shard(x, _manager(key).layout, pad_value)


def undispatch(x: torch.Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False) -> torch.Tensor:
    """The unpadded global tensor from every rank's rows. Backward keeps this rank's rows of the gradient; with
    ``is_partial_grad`` the gradients of all ranks are summed first."""
    if is_compiling():
        return compiled_gather(x, _facts(key), key.total_seqlen_q - key.pad_size, is_partial_grad)
    return token_layout.gather(x, _manager(key).layout, is_partial_grad)


def roll(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """Local form of ``torch.roll(padded global, shift, dim)``. Pad rows take part in the wrap-around, and documents do
    not matter: the last token of one gets the first of the next. For labels of packed documents use ``get_labels``."""
    if is_compiling():
        return compiled_roll(x, _facts(key), shift, dim)
    return _manager(key).roll(x, shift, dim)


def roll_simple(x: torch.Tensor, shift: int, dim: int, key: DistAttnRuntimeKey) -> torch.Tensor:
    """Another published name of ``roll``."""
    return roll(x, shift, dim, key)


def calc_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key: DistAttnRuntimeKey,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of the local rows over all keys that the mask allows.

    q ``(T, Hq, D)``, k ``(T, Hk, D)``, v ``(T, Hk, Dv)``, dispatched, any strides; ``sink`` ``(S, Hq)``, the same on
    all ranks. Returns out ``(T, Hq, Dv)`` in q's dtype and ``AttnForwardMeta(lse (T, Hq), max_logits (Hq,) over all
    ranks, or None)``. ``softmax_scale`` is a number, by default ``D ** -0.5``; to learn a scale, multiply q by it.
    Collective; differentiable in q, k, v, sink. Tensors on the meta device give tensors there. Under
    ``torch.compile(fullgraph=True)`` the call is one custom op, compiled once for all masks where the key is an
    argument of the model; where a module holds it, for each anew. Hold the key while a CUDA graph that was captured
    with it is replayed: of keys that nobody holds the least recently used go, with their tables on the GPU.
    """
    note_call(getattr(key, "_mark", None))
    if is_compiling():
        return compiled_attn(q, k, v, sink, _facts(key), softmax_scale, softcap, return_max_logits)
    manager = _manager(key)
    if are_on_meta(q, k, v):
        return attention_on_meta(q, v, return_max_logits)
    return manager.calc_attn(q, k, v, sink, softmax_scale, softcap, return_max_logits)


def get_position_ids(key: DistAttnRuntimeKey, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """int64 global positions of the local rows (padded length); pad rows report the last real token, so the result
    is a valid index into the unpadded sequence. On the GPU if there is one. With ``cu_seqlens``
    ``[0, n0, n0 + n1, ...]`` of the unpadded sequence positions count from 0 in every document."""
    if is_compiling():
        facts = _facts(key)
        return compiled_positions(facts, facts.positions_on, cu_seqlens is not None, cu_seqlens)
    manager = _manager(key)
    if cu_seqlens is not None:
        return documents.document_positions(manager.layout, manager.positions_on, cu_seqlens)
    return manager.get_position_ids()


def get_labels(
    tokens: torch.Tensor,
    key: DistAttnRuntimeKey,
    cu_seqlens: torch.Tensor,
    depth: int = 1,
    ignore_index: int = -100,
    dim: int = 0,
) -> torch.Tensor:
    """Next-token labels of dispatched ``tokens``: for every one the token ``depth`` further in its own document.

    ``cu_seqlens`` ``[0, n0, n0 + n1, ...]`` describes the unpadded sequence. ``ignore_index`` stands where there is no
    such token: at the last ``depth`` tokens of a document and at pads. Collective, as ``roll`` is.
    """
    if is_compiling():
        return compiled_labels(tokens, _facts(key), depth, ignore_index, dim, cu_seqlens)
    return documents.labels(tokens, _manager(key).layout, depth, ignore_index, dim, cu_seqlens)


def get_most_recent_key(cp_group: Any) -> DistAttnRuntimeKey:
    """The key last made or used for a group, or for a device mesh; ``ValueError`` for None or if there is none."""
    if cp_group is None:
        raise UnknownKeyError("cp_group is None; pass the process group that the key was made for.")
    key = dist_attn_runtime_dict_mgr.get_most_recent_key(cp_group)
    if key is None:
        raise UnknownKeyError("No dist attn runtime key exists for this group; make one with magi_attn_flex_key.")
    return key


def clear_cache(cp_group: Any = None) -> None:
    """Forgets the keys of one group (or device mesh) or of all; they raise ``ValueError`` from then on."""
    dist_attn_runtime_dict_mgr.clear(cp_group)
    if cp_group is None:
        forget_plans()


# ---- inner parts ------------------------------------------------------------------------------------


def _manager(key: DistAttnRuntimeKey, missing: str = _MISSING) -> RuntimeManager:
    _check_key(key, missing)
    manager = dist_attn_runtime_dict_mgr.get(key)
    if manager is not None:
        return manager
    if key._manager and not key._manager[0].is_cleared:  # evicted, but the caller still holds the key
        dist_attn_runtime_dict_mgr[key] = key._manager[0]
        return key._manager[0]
    raise UnknownKeyError(
        f"{missing} It was never made in this process or clear_cache() dropped it; make it again with "
        "magi_attn_flex_key or magi_attn_varlen_key."
    )


def _check_key(key: object, missing: str = _MISSING) -> None:
    if isinstance(key, DistAttnRuntimeKey):
        return
    remedy = "make one with magi_attn_flex_key or magi_attn_varlen_key"
    if isinstance(key, (Mask, Plan)):
        remedy += ", or use attend(q, k, v, plan), which takes the plan that make_plan makes of a Mask"
    raise UnknownKeyError(f"{missing} key is {type(key).__name__}; {remedy}.")


def _facts(key: DistAttnRuntimeKey) -> CompiledFacts:
    _check_key(key)
    return NO_FACTS if key._facts is None else key._facts


def _remember(key: DistAttnRuntimeKey, make) -> DistAttnRuntimeKey:
    manager = dist_attn_runtime_dict_mgr.get(key)  # a hit counts as use
    if manager is None:
        manager = make()
        dist_attn_runtime_dict_mgr[key] = manager
    key._manager.append(manager)
    object.__setattr__(key, "_facts", facts_of_manager(manager))
    return key


def _pad(q_ranges, k_ranges, types, total: int, pad: int):
    if not pad:
        return q_ranges, k_ranges, types
    return apply_padding(q_ranges, k_ranges, types, total, pad)
