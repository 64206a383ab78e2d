# SPDX-License-Identifier: Apache-2.0
"""``AttnRuntime``: one plan on one rank, ready to run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch

from magi_attention.comm.collectives.hierarchical import NodeLevels
from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.node_exchange import why_rows_stay
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.consistency import Use
from magi_attention.common.intervals import Packing
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.scalars import as_float
from magi_attention.env import comm
from magi_attention.errors import UnsupportedError
from magi_attention.functional.ahead import AHEAD, NOT_AHEAD, Ahead
from magi_attention.functional.calls.first_use import BACKWARD, FORWARD, ensure_call, settings_in_words, use_of_call
from magi_attention.functional.calls.inputs import check_local_qkv
from magi_attention.functional.heads.groups import check_head_chunks, head_chunks_of, rows_by_group
from magi_attention.functional.one_launch.base import OneLaunch, PreparedFused
from magi_attention.functional.one_launch.choice import over_nodes, over_nvlink
from magi_attention.functional.policy import AttnPolicy
from magi_attention.functional.stages.comm import QueryComm, StageComm
from magi_attention.functional.stages.joined import are_on_one_host, is_joined_faster
from magi_attention.functional.tokens.layout import check_ranks
from magi_attention.kernels import AttnOptions, Backend, Problem, Registry, accumulation_dtype
from magi_attention.kernels.dropout import Dropout, DropoutMask
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import FinalBackend, as_scale, options_of
from magi_attention.kernels.wheel_backend import WheelBackend
from magi_attention.meta.plan import Plan
from magi_attention.meta.rank_plan import RankPlan

_log = logging.getLogger("magi_attention.functional")
_MAX_PREPARED = 256
HOST, JOINED = -1, -2  # in place of a stage: local keys alone, or followed by those of all stages
QUERIES = -3  # rows of queries that other ranks send
_POSITIONS: Kind[tuple[int, torch.device], torch.Tensor] = Kind("positions of rows, by stage and device")
Trace = list[dict[str, Any]]  # of dicts: rank, lane ("compute" or "comm"), stage (-1 = host), start, end in seconds


@dataclass(frozen=True)
class Prepared:
    """What calls with tensors of the same shapes, dtypes and options share.

    ``forward`` and ``backward`` are for kernels that run while rows travel, ``*_alone`` for others, which may use all
    multiprocessors. ``final`` is the backend, if it can write results in the dtype of the inputs. With ``fused``
    there are no stages, and with ``is_joined`` the only one is waited for. Rows cross between nodes by ``exchange``, or
    by all-to-all-v. ``use`` and ``backward_use`` say what the ranks compare.
    """

    use: Use
    backward_use: Use
    backend: Backend
    final: FinalBackend | None
    fused: PreparedFused | None
    is_joined: bool
    exchange: ExchangeGroup | None
    forward: AttnOptions
    forward_alone: AttnOptions
    backward: AttnOptions
    backward_alone: AttnOptions


@dataclass
class AttnCall:
    """Inputs of one call that are not tensors of the graph. Lives from forward to backward. ``chunks``: with
    ``head_chunks`` the calls of which this one is made up."""

    runtime: AttnRuntime
    prepared: Prepared
    trace: Trace | None = None
    dropout: Dropout | None = None
    chunks: tuple[AttnCall, ...] = ()

    def dropout_mask(self, keys: int, device: torch.device, queries: int = HOST) -> DropoutMask | None:
        """Dropout over ``queries``, ``HOST`` or ``QUERIES``, and the keys of a stage, ``HOST`` or ``JOINED``."""
        if self.dropout is None:
            return None
        positions = self.runtime.positions
        return DropoutMask(self.dropout, positions(queries, device), positions(keys, device))

    def ensure_backward(self, dout: torch.Tensor) -> None:
        """The ranks compare what they do, as before the forward, unless the backward exchanges nothing."""
        runtime = self.runtime
        if not runtime.is_local:
            ensure_call(self.prepared.backward_use, runtime.transport, dout, self.dropout, runtime.policy.check)

    def record(self, lane: str, stage: int, start: float) -> None:
        if self.trace is not None:
            rank = self.runtime.transport.rank
            entry = {"rank": rank, "lane": lane, "stage": stage, "start": start, "end": time.perf_counter()}
            self.trace.append(entry)


class AttnRuntime:
    """Runs attention for ``transport.rank`` of ``plan``. What calls add to it are memos; tables are in ``cache``.

    With ``hierarchy`` rows cross between nodes once per node. ``head_groups``: the plan is
    one of ``plan_by_head_groups``, and calls have as many kv heads, each token's beside one another.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        registry: Registry,
        policy: AttnPolicy | None = None,
        hierarchy: NodeLevels | None = None,
        head_groups: int = 1,
    ) -> None:
        check_ranks(plan, transport)
        self.plan = plan
        self.transport = transport
        self.registry = registry
        self.policy = policy or AttnPolicy()
        self.head_groups = head_groups
        self.part: RankPlan = plan.rank(transport.rank)
        self._hierarchy = hierarchy
        self._fused: tuple[OneLaunch | None] | None = None  # once decided
        ahead = plan.cache.find(AHEAD, transport.rank) or NOT_AHEAD
        self.comms: tuple[StageComm, ...] = tuple(self._comm(s, hierarchy, ahead) for s in range(plan.num_stages))
        queries = self.part.queries
        self.queries = None if queries is None else QueryComm(queries.cast, transport, ahead.queries)
        self.is_local = self.queries is None and all(comm.is_idle for comm in self.comms)  # on every rank alike
        self._prepared: dict[tuple[object, ...], Prepared] = {}
        self.cache = PlanCache()
        self.cache.include(*(comm.cache for comm in self.comms))
        if self.queries is not None:
            if hierarchy is not None:
                raise UnsupportedError("Rows do not cross nodes by levels where queries move; drop one of the two.")
            self.cache.include(self.queries.cache)
        plan.cache.include(self.cache)

    def _comm(self, stage: int, hierarchy: NodeLevels | None, ahead: Ahead) -> StageComm:
        plan = self.plan
        spec, is_idle = self.part.stages[stage].cast, plan.stage_is_idle[stage]
        specs = [plan.cast_spec(r, stage) for r in range(plan.cp_size)] if hierarchy and not is_idle else ()
        made = ahead.stages[stage] if ahead.stages else None
        return StageComm(spec, self.transport, is_idle, hierarchy, specs, made)

    @property
    def keeps_tail(self) -> bool:
        """Does the forward keep the keys of the last stage for the backward, if it runs in stages?"""
        is_staged = not self.is_local and not self.is_blocking and self.queries is None and self.policy.head_chunks == 1
        return is_staged and self.policy.hide_tail_reduce and bool(self.part.stages)

    @property
    def is_blocking(self) -> bool:
        """Degree 0: fetch everything, then one kernel over local and fetched keys."""
        return self.plan.degree == 0 and self.plan.num_stages == 1

    def positions(self, keys: int, device: torch.device) -> torch.Tensor:
        """int32: where the keys of a stage, ``HOST`` or ``JOINED``, or ``QUERIES`` lie in the whole sequence."""

        def make() -> torch.Tensor:
            if keys == QUERIES:
                assert self.part.queries is not None
                return torch.from_numpy(Packing(self.part.queries.recv_ranges).positions()).to(device, torch.int32)
            stages = self.part.stages
            remote = stages if keys == JOINED else [] if keys == HOST else [stages[keys]]
            parts = [self.plan.position_array(self.transport.rank)] if keys < 0 else []
            parts += [Packing(stage.recv_ranges).positions() for stage in remote]
            return torch.from_numpy(np.concatenate(parts)).to(device, torch.int32)

        return self.cache.get(_POSITIONS, (keys, device), make)

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None,
        softmax_scale: float | None, softcap: float, return_max_logits: bool, trace: Trace | None = None,
        needs_backward: bool | None = None, dropout: Dropout | None = None, *, is_chunk: bool = False,
    ) -> AttnCall:  # fmt: skip
        """Checks the inputs and picks the backend; errors are told to the other ranks by the caller's guard.

        ``needs_backward``: by default, whether a tensor requires a gradient. ``is_chunk``: these are heads of a chunk.
        """
        if softmax_scale is not None and type(softmax_scale) is not float:  # the memo would know a tensor by identity
            softmax_scale = as_scale(softmax_scale)
        if type(softcap) is not float:
            softcap = as_float(softcap, "softcap")
        if type(return_max_logits) is not bool:
            return_max_logits = bool(return_max_logits)
        # Attributes one by one, and no question whether they are tensors: this is on the path of every layer.
        try:
            if needs_backward is None:
                needs_backward = q.requires_grad or k.requires_grad or v.requires_grad
                needs_backward = needs_backward or (sink is not None and sink.requires_grad)
            key = (
                type(q), q.shape, q.dtype, q.device, type(k), k.shape, k.dtype, k.device,
                type(v), v.shape, v.dtype, v.device,
                None if sink is None else (type(sink), sink.shape, sink.dtype, sink.device),
                needs_backward, softmax_scale, softcap, return_max_logits, None if dropout is None else dropout.p,
            )  # fmt: skip
        except AttributeError:
            self._check_inputs(q, k, v, sink)
            raise
        if self.policy.head_chunks > 1 and not is_chunk:
            options = (softmax_scale, softcap, return_max_logits, trace, needs_backward, dropout)
            return self._call_by_head_chunks((q, k, v, sink), options)
        prepared = self._prepared.get(key)
        if prepared is None:
            self._check_inputs(q, k, v, sink)
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            use = use_of_call(self.plan, self._settings, q, k, v, sink, scale, softcap, return_max_logits, dropout)
        else:
            use = prepared.use
        if not self.is_local or not self.transport.knows(use.name):  # a rank may call alone where no row travels
            ensure_call(use, self.transport, q, dropout, self.policy.check)
        if prepared is None:
            prepared = self._prepare(q, k, v, sink, needs_backward, scale, softcap, return_max_logits, dropout, use)
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared
        if trace is None and self.registry.instruments.observe is not None:
            trace = self.registry.instruments.observe(self.plan, self.transport.rank, q)
        return AttnCall(self, prepared, trace, dropout)

    def _call_by_head_chunks(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> AttnCall:
        self._check_inputs(*tensors)
        count, dropout = self.policy.head_chunks, options[-1]
        try:
            check_head_chunks(count, tensors[1], dropout is not None, self.head_groups)
        except Exception as exc:
            self.transport.decline(exc, tensors[0], FORWARD)
            raise
        chunks = tuple(self.call(*part, *options, is_chunk=True) for part in head_chunks_of(count, *tensors))
        return replace(chunks[0], chunks=chunks)

    def _check_inputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> None:
        rows = self.part.num_tokens // self.head_groups
        try:
            check_local_qkv(q, k, v, sink, rows, self.transport.rank, self.head_groups)
        except Exception as exc:
            self.transport.decline(exc, q, FORWARD)
            raise

    def _prepare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, needs_backward: bool,
        scale: float, softcap: float, with_max: bool, dropout: Dropout | None, use: Use,
    ) -> Prepared:  # fmt: skip
        policy, share = self.policy, 0.0 if dropout is None else dropout.p
        forward, backward = 0 if self.is_local else policy.fwd_sm_margin, 0 if self.is_local else policy.bwd_sm_margin
        options = [
            options_of(scale, softcap, "sh", policy.deterministic, margin, is_forward and with_max, share)
            for is_forward, margin in ((True, forward), (True, 0), (False, backward), (False, 0))
        ]
        if self.head_groups > 1:
            if sink is not None or with_max or dropout is not None:
                raise UnsupportedError(
                    "Head groups go to ranks of their own, which have no sink, max_logits or dropout; unset "
                    "MAGI_ATTENTION_FLATTEN_HEAD_GROUPS, or drop these."
                )
            q, k, v = (rows_by_group(x, self.head_groups) for x in (q, k, v))
        problem = Problem.of(q, k, v, options[0], sink, needs_backward=needs_backward)
        backend, _ = self.registry.select(problem, policy.backend, policy.is_backend_explicit)
        if self.queries is not None and needs_backward and isinstance(backend, WheelBackend):
            raise UnsupportedError(
                f"Queries move in this plan, and the backward of {backend.name} needs whole outputs; make the plan "
                'with query_moves="never", or set MAGI_ATTENTION_KERNEL_BACKEND=ffa.'
            )
        final = backend if isinstance(backend, FinalBackend) else None
        if dropout is not None:
            self._refuse_one_launch()
        attention = self._fused_attention(backend, q) if dropout is None else None
        fused = None if attention is None else PreparedFused(attention, cast(FfaBackend, backend))
        exchange = None if fused is not None or self.is_local else self._exchange(k, v)
        is_joined = fused is None and self._is_joined(q, k, v)
        return Prepared(use, use.of(BACKWARD), backend, final, fused, is_joined, exchange, *options)

    def _is_joined(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Degree 0, or a single stage on GPUs that is not worth hiding. Messages are the same either way."""
        if self.is_blocking or self.is_local or self.queries is not None:
            return self.is_blocking
        if not q.is_cuda or self.plan.num_stages != 1 or self.policy.hide_tail_reduce:
            return False
        is_one_host = are_on_one_host(self.transport.ranks, comm.launcher_node_size())
        return is_joined_faster(int(self.plan.comm_matrix().sum(0).max()), q, k, v, is_one_host)

    def _refuse_one_launch(self) -> None:
        """Calls with dropout go stage by stage, and one launch may have been asked for."""
        if self.policy.stage_mode == "fused" and not self.is_local:
            raise UnsupportedError(
                "MAGI_ATTENTION_NATIVE_GRPCOLL=1 runs attention in one launch, which has no dropout; unset it, or set "
                "dropout_p to 0."
            )

    @cached_property
    def _settings(self) -> str:
        """The fields of the policy that decide which messages are sent in which form."""
        is_hierarchical = self._hierarchy is not None  # by a mesh, too
        policy = replace(self.policy, fwd_sm_margin=0, bwd_sm_margin=0, node_sizes=(), hierarchical=is_hierarchical)
        return settings_in_words(policy)

    def _fused_attention(self, backend: Backend, q: torch.Tensor) -> OneLaunch | None:
        """How the plan runs in one launch, or None: stage by stage. Decided at the first call, alike on all ranks."""
        mode = self.policy.stage_mode
        if mode == "staged" or self.is_local:  # where no rank reads a key of another there is nothing to send
            return None
        if self.queries is not None:
            if mode == "fused":
                _warn_once("because queries move in this plan.")
            return None
        if q.device.type != "cuda" or not hasattr(backend, "backward_fused"):
            if mode == "fused":
                where = f"{backend.name} on {q.device.type}"
                _warn_once(f"as keys that arrive while a kernel runs need the ffa backend on GPUs, not {where}.")
            return None
        if self._fused is None:
            self._fused = (self._decide(q.device),)
        return self._fused[0]

    def _decide(self, device: torch.device) -> OneLaunch | None:
        was_asked_for = self.policy.stage_mode == "fused"
        precise = self.policy.high_precision_reduce
        if self._hierarchy is None:
            made, reason = over_nvlink(self.plan, self.transport, precise, was_asked_for)
        else:
            nodes, wish = self._hierarchy.nodes, self.policy.node_transport
            made, reason = over_nodes(self.plan, self.transport, nodes, wish, precise, device)
        if made is not None:
            self.cache.include(made.cache)
            return made
        if was_asked_for:
            raise UnsupportedError(
                f"MAGI_ATTENTION_NATIVE_GRPCOLL=1 cannot be done here: {reason} Unset it to go stage by stage over the "
                "process group."
            )
        _log.info("Attention runs stage by stage over the process group: %s", reason)
        return None

    def _exchange(self, k: torch.Tensor, v: torch.Tensor) -> ExchangeGroup | None:
        """What moves rows like these between nodes by one-sided transfers, or None; alike on all ranks."""
        if self._hierarchy is None:
            return None
        wish = self.policy.node_transport
        group = exchange_group(self.transport, self._hierarchy.nodes, k.device, wish)
        wire = accumulation_dtype(k.dtype) if self.policy.high_precision_reduce else k.dtype
        packs = (RowPack.of((k, v), (dtype, dtype)) for dtype in (k.dtype, wire))
        reason = why_rows_stay(*packs)
        if group is None or reason is None:
            return group
        if wish != "auto":
            raise UnsupportedError(f"MAGI_ATTENTION_NODE_TRANSPORT={wish} cannot be done here: {reason} Unset it.")
        _log.info("Rows of such k and v go between nodes by all-to-all-v: %s", reason)
        return None


@lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    """Once for a process: masks of their own in every step make as many runtimes."""
    _log.warning("Attention runs stage by stage over the process group, %s", reason)


__all__ = ["AttnCall", "AttnPolicy", "AttnRuntime", "Trace", "accumulation_dtype"]
