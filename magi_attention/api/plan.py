# SPDX-License-Identifier: Apache-2.0
"""The API for new code: ``Mask -> make_plan -> plan.shard / gather / roll / positions -> attend``.

``group`` is a torch process group, a ``Transport``, or None: the default group if torch.distributed is
initialised, else this process alone. A plan for one rank needs no group.

Under ``torch.compile(fullgraph=True)`` each of these calls is one custom op, as the published functions are. Where the
plan is an argument of the model, it is compiled for one plan and then for any; where a module holds the plan, for each
anew. Settings of the environment are those of the time when the model was compiled.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.compiler import is_compiling

from magi_attention.api.compiled.handles import NO_FACTS, CompiledFacts, PlanFacts, facts_in_group, facts_of_plan
from magi_attention.api.compiled.ops import compiled_attn
from magi_attention.api.compiled.rows import (
    compiled_gather,
    compiled_labels,
    compiled_positions,
    compiled_roll,
    compiled_shard,
)
from magi_attention.api.planning.balance_hint import advise_other_mask
from magi_attention.api.policy import policy_of_environment
from magi_attention.comm.collectives.hierarchical import join_nodes
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.config import DistAttnConfig, OverlapConfig
from magi_attention.config.rates import MachineRates
from magi_attention.env import comm
from magi_attention.env.snapshot import RuntimeFlags
from magi_attention.errors import ContractError
from magi_attention.functional import ahead
from magi_attention.functional.attention_memory import plan_memory
from magi_attention.functional.calls.attention_check import PlanMark, note_call
from magi_attention.functional.calls.on_meta import are_on_meta, attention_on_meta
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.policy import AttnPolicy
from magi_attention.functional.recurrent import layouts
from magi_attention.functional.runtime import AttnRuntime, Trace
from magi_attention.functional.tokens import documents
from magi_attention.functional.tokens import layout as token_layout
from magi_attention.kernels import default_registry
from magi_attention.kernels.dropout import dropout_of
from magi_attention.kernels.ffa.ahead import KernelTiles
from magi_attention.meta import plan as meta_plan
from magi_attention.meta.explain import explain
from magi_attention.meta.planner import PlanOptions, build_plan, plan_for_partitions
from magi_attention.meta.predict.model_memory import MemoryUse, TrainingSetup
from magi_attention.meta.predict.model_shape import ModelShape
from magi_attention.meta.recurrent.ways import RecurrentShape

DEFAULT_BALANCE = 1.02  # without a chunk size, chunks are refined until the heaviest rank is within 2%


class Plan(meta_plan.Plan):
    """A plan that can also move tensors. Still a pure value: what it caches is not compared, and not pickled either but
    for what ``prepare`` made."""

    def shard(
        self,
        x: torch.Tensor,
        group: Any = None,
        pad_value: float = 0.0,
        dim: int = 0,
        is_partial_grad: bool = False,
    ) -> torch.Tensor:
        """This rank's rows of ``x``, a global tensor of ``total_tokens`` rows that all ranks hold.

        Shard token ids, before the first parameter: then gradients of all parameters add up over the ranks
        (``sum_gradients``, ``set_gradient_sum``). If parameters made ``x``, every rank gets its whole gradient,
        so a sum over ranks counts these parameters once for each rank; with ``is_partial_grad`` it gets the share of
        its own rows, which is to be summed as the other gradients are, and nothing is sent in the backward pass.
        """
        if is_compiling():
            return compiled_shard(x, self._facts(group), pad_value, dim, is_partial_grad)
        return token_layout.shard(x, self._layout(group), pad_value, dim, is_partial_grad=is_partial_grad)

    def gather(self, x: torch.Tensor, group: Any = None, is_partial_grad: bool = False, dim: int = 0) -> torch.Tensor:
        """The global tensor in natural order, ``total_tokens`` rows, on every rank."""
        if is_compiling():
            return compiled_gather(x, self._facts(group), self.total_tokens, is_partial_grad, dim)
        return token_layout.gather(x, self._layout(group), is_partial_grad, dim)

    def to_contiguous(self, x: torch.Tensor, group: Any = None, dim: int = 0) -> torch.Tensor:
        """This rank's part of the padded sequence cut into consecutive shards, from the local rows of all ranks.

        Shard r has as many rows as rank r holds (``shard_sizes``), and they follow those of rank r - 1. For layers that
        want their tokens in order. One all-to-all-v, and one for gradients; any dtype, any other dims."""
        return layouts.to_contiguous(x, self._layout(group), dim)

    def from_contiguous(self, x: torch.Tensor, group: Any = None, dim: int = 0) -> torch.Tensor:
        """The inverse of ``to_contiguous``."""
        return layouts.from_contiguous(x, self._layout(group), dim)

    def roll(self, x: torch.Tensor, shift: int, group: Any = None, dim: int = 0) -> torch.Tensor:
        """``torch.roll(padded global tensor, shift, dim)`` in local form. Pad rows take part in the wrap-around, and
        documents do not matter: with shift -1 the last token of one gets the first of the next. For next-token labels
        use ``labels``."""
        if is_compiling():
            return compiled_roll(x, self._facts(group), shift, dim)
        return token_layout.roll(x, self._layout(group), shift, dim)

    def labels(
        self,
        tokens: torch.Tensor,
        depth: int = 1,
        ignore_index: int = -100,
        group: Any = None,
        dim: int = 0,
        cu_seqlens: Any = None,
    ) -> torch.Tensor:
        """Next-token labels: for every local token the token ``depth`` further in its own document.

        ``tokens`` is local (``plan.shard(tokens)``), any integer dtype that holds ``ignore_index``, which stands where
        there is no such token: at the last ``depth`` tokens of a document and at pads. The next token may live on
        another rank, so this is collective over the group, as ``roll`` is. ``depth`` 2, 3, ... are the labels of
        multi-token prediction. Documents are those of the mask; for a mask that does not know them (slices, trees),
        or to use others, give ``cu_seqlens`` ``[0, n0, n0 + n1, ...]``, the same on all ranks.
        """
        if is_compiling():
            return compiled_labels(tokens, self._facts(group), depth, ignore_index, dim, cu_seqlens)
        return documents.labels(tokens, self._layout(group), depth, ignore_index, dim, cu_seqlens)

    def positions(
        self,
        group: Any = None,
        device: torch.device | str = "cpu",
        per_document: bool = False,
        cu_seqlens: Any = None,
    ) -> torch.Tensor:
        """int64 global position of every local row; pad rows get that of the last real token. No communication.

        ``per_document`` counts from 0 in every document, as rotary embeddings of packed documents want it (the
        ``position_ids`` of transformers); documents as of ``labels``. M-RoPE ids ``(3, T)`` are three equal rows for
        text, ``positions(per_document=True).expand(3, -1)``; ids of one's own are sharded, ``shard(ids, dim=1)``.
        ``group`` may also be a rank number, to ask on behalf of another rank.
        """
        if cu_seqlens is not None and not per_document:
            raise ContractError("cu_seqlens= is given without per_document=True, to which alone it matters; give both.")
        if is_compiling():
            return self._compiled_positions(group, torch.device(device), per_document, cu_seqlens)
        if isinstance(group, int):
            ids = np.minimum(self.position_array(group), self.total_tokens - 1)
            return torch.from_numpy(ids - self.document_bounds(group, cu_seqlens)[0] if per_document else ids).to(
                device
            )
        layout = self._layout(group)
        if per_document:
            return documents.document_positions(layout, device, cu_seqlens)
        return token_layout.positions(layout, device)

    def with_mask(self, mask: Mask, overlap: OverlapConfig | None = None) -> Plan:
        """The plan of another mask over the same dispatch, for models that mix masks. Its balance is that of
        this plan's mask, and so are its documents where the new mask knows none. ``overlap`` stands for itself: rates
        of this plan do not complete it."""
        _check_square(mask, self.total_tokens)
        mask.check()
        options = PlanOptions.of(self)
        plan = plan_for_partitions(
            mask.slices,
            self.total_tokens,
            self.pad_size,
            self.chunk_size,
            self.partitions,
            options if mask.cu_seqlens is None else replace(options, cu_seqlens=mask.cu_seqlens),
            overlap=overlap or self.overlap,
            uneven_shard=self.uneven_shard,
            nodes=self.nodes,
        )
        advise_other_mask(plan)
        return plan

    def prepare(self, rank: int, kernels: KernelTiles | None = None) -> Plan:
        """Makes what the first call of ``rank`` would make: its part of the plan, the layouts of the rows that travel
        and, with ``kernels`` (``kernel_tiles``), tile plans and schedules. Returns the plan.

        A pickle of the plan then holds that, too, so a worker process of a data loader can make it. No GPU and no
        group is used. ``IndexError`` for a rank that the plan does not have.
        """
        ahead.prepare(self, rank, kernels)
        return self

    def explain(self, element_bytes: int = 2, recurrent: RecurrentShape | None = None) -> dict:
        """The plan in numbers; see ``magi_attention.meta.explain``."""
        return explain(self, element_bytes, recurrent)

    def memory(self, shape: ModelShape, setup: TrainingSetup | None = None) -> MemoryUse:
        """Predicted bytes of one training step of a model, on the GPU and on the host, on the rank that takes most.

        Attention's share is counted in the buffers of this plan, for the heads of ``shape``; the rest is arithmetic
        for a Llama-like decoder in eager PyTorch under FSDP2. ``UnsupportedError`` where queries move.
        """
        return plan_memory(self, shape, setup or TrainingSetup())

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `magi explain` for this plan, below 500 KB for any plan."""
        from magi_attention.tools.report.plan_page import notebook_view

        return notebook_view(self)

    # ---- inner parts --------------------------------------------------------------------------------

    _plan_facts: PlanFacts
    _mark: PlanMark

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_plan_facts"], self.__dict__["_mark"] = facts_of_plan(self), PlanMark()

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "packed": ahead.packed(self)}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "packed"})
        ahead.unpack(self, state["packed"])
        self.__dict__["_plan_facts"], self.__dict__["_mark"] = facts_of_plan(self), PlanMark()

    def _facts(self, group: Any, policy: AttnPolicy | None = None) -> CompiledFacts:
        """Traced; see ``handles``."""
        return facts_in_group(self._plan_facts, group, self.cp_size > 1, policy)

    def _compiled_positions(self, group: Any, device: torch.device, per_document: bool, cu_seqlens: Any):
        if isinstance(group, int):
            facts = NO_FACTS._replace(handle=self._plan_facts.handle, local_rows=self._plan_facts.rows[group])
            return compiled_positions(facts, device, per_document, cu_seqlens, of_rank=group)
        return compiled_positions(self._facts(group), device, per_document, cu_seqlens)

    @cached_property
    def _layouts(self) -> dict:
        return {}

    @cached_property
    def _runtimes(self) -> dict:
        return {}

    def _layout(self, group: Any) -> token_layout.TokenLayout:
        if group is None and self.cp_size == 1:
            if None not in self._layouts:
                self._layouts[None] = token_layout.TokenLayout(self, SingleTransport())
            return self._layouts[None]
        transport = as_transport(group)
        key = (transport.ranks, transport.rank, _identity(group))
        if key not in self._layouts:
            self._layouts[key] = token_layout.TokenLayout(self, transport)
        return self._layouts[key]

    def _runtime(self, group: Any, policy: AttnPolicy | None) -> AttnRuntime:
        layout = self._layout(group)
        policy, hierarchy = policy or policy_of_environment(), None
        if policy.hierarchical and layout.transport.size > 1:
            hierarchy = join_nodes(layout.transport, policy.node_sizes, comm.launcher_node())
        key = (layout.transport, policy, hierarchy)
        if key not in self._runtimes:
            self._runtimes[key] = AttnRuntime(self, layout.transport, default_registry(), policy, hierarchy)
        return self._runtimes[key]


def _identity(group: Any) -> Any:
    """What tells two groups over the same ranks apart; the default group is asked for anew each time. Process groups
    are referred to weakly: a plan that is held must not keep alive what destroy_process_group ended."""
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    return weakref.ref(group) if isinstance(group, torch.distributed.ProcessGroup) else group


def make_plan(
    mask: Mask,
    cp_size: int,
    config: DistAttnConfig | None = None,
    *,
    num_heads_q: int = 1,
    num_heads_kv: int = 1,
    head_dim: int = 1,
    check: bool = True,
    balance: float | None = DEFAULT_BALANCE,
    query_moves: str = "never",
    rates: MachineRates | None = None,
) -> Plan:
    """Plans ``mask`` over ``cp_size`` ranks: a pure function on the CPU, the same on every rank.

    Head counts and head dim enter the predicted bytes and times only. ``check`` proves, once for each mask,
    that slices are disjoint. ``balance`` is the tolerated ratio of the heaviest rank to
    the mean where the chunk size is left open; None keeps the first choice. ``query_moves``: with "always" queries may
    travel to the keys, and outputs back, where that is cheaper than keys and values to the queries; with "auto" if it
    saves 5% of the modelled time, by ``rates`` or those of H100 GPUs; head counts matter then. ``rates`` of the
    machine (``load_rates``) choose the overlap degree of mode DYNAMIC, the row cost of ``LocalityDispatchAlg`` and
    whether "auto" moves queries; they must be the same on all ranks, as the mask must. ``ContractError`` for a mask
    that is not square, for overlapping slices, and for a config that gives itself what rates decide. A sequence
    shorter than ``cp_size`` is padded, as any other is. Which ranks share a node is not read from the environment, for
    ranks of a plan need not be those of the job: say it by ``DispatchConfig(nodes=)``.
    """
    if not isinstance(mask, Mask):
        raise ContractError(f"mask is {type(mask).__name__}; build one with Mask.causal(...), Mask.varlen(...) etc.")
    _check_square(mask, mask.total_q)
    if check:
        mask.check()
    flags = RuntimeFlags.from_env()
    options = PlanOptions(num_heads_q, num_heads_kv, head_dim, mask.cu_seqlens, query_moves, rates, Plan)
    least = flags.min_chunks_per_rank
    return build_plan(
        mask.slices, mask.total_q, cp_size, options, config=config, min_chunks_per_rank=least, balance=balance
    )


def _check_square(mask: Mask, total: int) -> None:
    if mask.total_q != mask.total_k or mask.total_q != total:
        raise ContractError(
            f"The mask has {mask.total_q} queries and {mask.total_k} keys; distributed self-attention over "
            f"{total} tokens needs as many of both."
        )


def check_plan(plan: object) -> None:
    """``ContractError`` for what stands in the place of a plan and is none."""
    if isinstance(plan, Plan):
        return
    if isinstance(plan, Mask):
        given, remedy = "a Mask", "plan it once, make_plan(mask, cp_size), and give that plan to every call"
    elif hasattr(plan, "cp_group"):
        given, remedy = "a key", "give the plan of make_plan, or use calc_attn, which takes keys"
    else:
        given = "a tensor" if isinstance(plan, torch.Tensor) else f"of type {type(plan).__name__}"
        remedy = "give the plan of make_plan(mask, cp_size); what the mask is, a Mask says: Mask.from_dense of a matrix"
    raise ContractError(f"plan is {given}; {remedy}.")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    group: Any = None,
    *,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    policy: AttnPolicy | None = None,
    trace: Trace | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of this rank's tokens over the whole sequence under the plan's mask.

    q ``(T, Hq, D)``, k ``(T, Hk, D)``, v ``(T, Hk, Dv)`` hold this rank's ``T`` tokens (``plan.shard``). Returns
    out ``(T, Hq, Dv)`` in q's dtype and ``AttnForwardMeta(lse (T, Hq), max_logits (Hq,) or None)``.
    ``softmax_scale`` is a number, by default ``D ** -0.5``; to learn a scale, multiply q by it. ``softcap`` > 0 caps
    logits; ``sink`` ``(S, Hq)`` holds extra logits, the same on all ranks. Differentiable in q, k, v and sink.
    ``dropout_p`` > 0 drops that share of the weights after the softmax, by ``dropout_seed``: an integer, the same on
    all ranks, and another one for each layer and step. Which weights go depends on the seed, the head and the global
    positions of query and key alone, so it is the same for any number of ranks.
    Under ``torch.autocast`` q, k and v take its dtype, as those of torch's own attention do, and so does out.
    Collective over the group. Gradients of parameters are those of this rank's tokens: sum them over the group
    (``sum_gradients``; ``set_gradient_sum`` for DDP and FSDP2), do not average them. ``trace`` collects timed steps
    (dicts of rank, lane, stage, start, end). Tensors on the meta device give tensors there.
    """
    check_plan(plan)
    note_call(plan._mark)
    if are_on_meta(q, k, v):
        return attention_on_meta(q, v, return_max_logits)
    if is_compiling():
        if trace is not None:
            raise ContractError("trace= collects nothing in a compiled model; leave it out, or call attend uncompiled.")
        facts = plan._facts(group, policy)
        options = (softmax_scale, softcap, return_max_logits, dropout_p, dropout_seed)
        return compiled_attn(q, k, v, sink, facts, *options)
    runtime = plan._runtime(group, policy)
    dropout = dropout_of(dropout_p, dropout_seed)
    out, lse, max_logits = dist_attn(q, k, v, runtime, sink, softmax_scale, softcap, return_max_logits, trace, dropout)
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits)
