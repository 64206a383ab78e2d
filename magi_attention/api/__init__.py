# SPDX-License-Identifier: Apache-2.0
"""The public functions.

New code: ``Mask, make_plan, plan_async, Plan, attend, attend_index, attend_replicated_kv``. Existing code: functions
of the published 1.1.x API, on top of the same plans. ``AttnPolicy`` says how a plan is run.
"""

from magi_attention.api.gradients import set_gradient_sum, sum_gradients
from magi_attention.api.index_attn import IndexExchange, attend_index, prepare_index_exchange
from magi_attention.api.indexer import indexer_kl, indexer_topk, indexer_topk_blocks
from magi_attention.api.keys.helpers import (
    compute_pad_size,
    full_attention_to_varlen_attention,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)
from magi_attention.api.keys.interface import (
    DistAttnRuntimeDictManager,
    GeneralAttnMaskType,
    calc_attn,
    clear_cache,
    dispatch,
    dist_attn_runtime_dict_mgr,
    get_labels,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    roll_simple,
    undispatch,
)
from magi_attention.api.keys.key import DistAttnRuntimeKey, init_dist_attn_runtime_key
from magi_attention.api.keys.manager import init_dist_attn_runtime_mgr
from magi_attention.api.memory import longest_context
from magi_attention.api.plan import Mask, Plan, attend, make_plan
from magi_attention.api.planning.ahead import kernel_tiles, plan_async
from magi_attention.api.planning.rates import load_rates
from magi_attention.api.recurrent import causal_conv1d, conv_history, decay_of_fragments, pass_states, run_recurrent
from magi_attention.api.replicated_kv import attend_replicated_kv
from magi_attention.common.enum import AttnMaskType, AttnOverlapMode
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.ranges import AttnRanges
from magi_attention.config import (
    BSDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    GreedyOverlapAlg,
    GrpCollConfig,
    LBDispatchAlg,
    LocalityDispatchAlg,
    MinHeapDispatchAlg,
    OverlapAlg,
    OverlapConfig,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
)
from magi_attention.config.rates import MachineRates
from magi_attention.functional import AttnPolicy, block_sparse_attn_func, flex_flash_attn_func, index_attn_func
from magi_attention.functional.calls.attention_check import AttentionCheck
from magi_attention.functional.calls.kept_results import keep_attention
from magi_attention.kernels.index_attn import PreparedIndices, prepare_indices
from magi_attention.meta.predict.model_memory import MemoryUse, TrainingSetup
from magi_attention.meta.predict.model_shape import Experts, ModelShape
from magi_attention.meta.recurrent.ways import RecurrentShape

__all__ = [
    "AttentionCheck",
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnPolicy",
    "AttnRanges",
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnRuntimeDictManager",
    "DistAttnRuntimeKey",
    "Experts",
    "GeneralAttnMaskType",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "IndexExchange",
    "LBDispatchAlg",
    "Mask",
    "LocalityDispatchAlg",
    "MachineRates",
    "MemoryUse",
    "MinHeapDispatchAlg",
    "ModelShape",
    "OverlapAlg",
    "OverlapConfig",
    "Plan",
    "PreparedIndices",
    "RecurrentShape",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "TrainingSetup",
    "UniformOverlapAlg",
    "attend",
    "attend_index",
    "attend_replicated_kv",
    "calc_attn",
    "causal_conv1d",
    "clear_cache",
    "compute_pad_size",
    "conv_history",
    "decay_of_fragments",
    "dispatch",
    "dist_attn_runtime_dict_mgr",
    "flex_flash_attn_func",
    "full_attention_to_varlen_attention",
    "get_labels",
    "get_most_recent_key",
    "get_position_ids",
    "block_sparse_attn_func",
    "index_attn_func",
    "indexer_kl",
    "indexer_topk",
    "indexer_topk_blocks",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "init_dist_attn_runtime_key",
    "init_dist_attn_runtime_mgr",
    "keep_attention",
    "kernel_tiles",
    "load_rates",
    "longest_context",
    "magi_attn_flex_key",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_plan",
    "make_varlen_key_for_new_mask_after_dispatch",
    "pass_states",
    "plan_async",
    "prepare_index_exchange",
    "prepare_indices",
    "roll",
    "roll_simple",
    "run_recurrent",
    "set_gradient_sum",
    "squash_batch_dim",
    "sum_gradients",
    "undispatch",
]
