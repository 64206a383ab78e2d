# SPDX-License-Identifier: Apache-2.0
"""What the custom ops of a compiled model name, since an op takes tensors, numbers and words: the manager of a key or
a plan by a number, its handle; a group by its name; a policy by a number.

Facts are what a model is traced with: the names, and what the shapes of results depend on. A key and a plan carry
theirs, so a compiled model that gets another one is compiled once more, for any number; but where a module holds it,
whose numbers torch takes for constants.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from magi_attention.api.keys.manager import DistAttnRuntimeDict, RuntimeManager
from magi_attention.api.policy import policy_of_environment
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.env import general
from magi_attention.errors import ContractError, UnknownKeyError
from magi_attention.functional.policy import AttnPolicy
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict.cost import stage_rows

_numbers = itertools.count(2)  # torch compiles 0 and 1 as constants
_held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # managers and plans by handle
_transports: weakref.WeakValueDictionary[str, Transport] = weakref.WeakValueDictionary()
_policies: list[AttnPolicy | None] = [None]  # a manager has one of its own, and that is number 0
_POLICY_FIELDS = tuple(f.name for f in fields(AttnPolicy))


class CompiledFacts(NamedTuple):
    """What a compiled model knows of attention on this rank: names, this rank's rows, how many rows the forward keeps
    for the backward, what is computed in (None for q's dtype), and where position ids are wanted."""

    handle: int
    group: str
    policy: int
    local_rows: int
    tail_rows: int
    precision: torch.dtype | None
    positions_on: torch.device


class PlanFacts(NamedTuple):
    """The part of the facts that is a plan's: rows of every rank, and rows of its last stage."""

    handle: int
    rows: tuple[int, ...]
    tail_rows: tuple[int, ...]


NO_FACTS = CompiledFacts(0, "", 0, 0, 0, None, torch.device("cpu"))  # of a key that was never made: 0 is no handle


# ---- making facts -----------------------------------------------------------------------------------


def facts_of_manager(manager: RuntimeManager) -> CompiledFacts:
    """The handle is forgotten when the manager is."""
    facts = manager.__dict__.get("compiled_facts")
    if facts is None:
        runtime = manager.dist_attn_runtime
        tail_rows, precision = runtime.comms[-1].rows if runtime.keeps_tail else 0, runtime.policy.precision
        rows, on = manager.layout.num_local, manager.positions_on
        facts = CompiledFacts(next(_numbers), "", 0, rows, tail_rows, precision, on)
        manager.__dict__["compiled_facts"] = facts
        _held[facts.handle] = manager
    return facts


def facts_of_plan(plan: Plan) -> PlanFacts:
    """A new handle for ``plan``, forgotten when the plan is. It is not known yet which group runs the plan, and how."""
    has_tail = plan.degree != 0 and plan.num_stages > 0 and not all(plan.stage_is_idle)
    tails = tuple(stage_rows(plan)[:, -1].tolist()) if has_tail else (0,) * plan.cp_size
    facts = PlanFacts(next(_numbers), plan.shard_sizes, tails)
    _held[facts.handle] = plan
    return facts


def facts_in_group(plan: PlanFacts, group: Any, has_group: bool, policy: AttnPolicy | None = None) -> CompiledFacts:
    """Traced. Without ``has_group`` this process alone runs the plan if no group is given."""
    name = _name_of_group(group)
    rank = 0 if group is None and not has_group else _rank_in(name)
    # A plan for fewer ranks than the group has is refused when the op runs.
    rows, tail_rows = (plan.rows[rank], plan.tail_rows[rank]) if rank < len(plan.rows) else (0, 0)
    if policy is None:
        number, keeps_tail, precision = _policy_of_environment()
    else:
        values = [getattr(policy, name) for name in _POLICY_FIELDS]
        # index() makes a constant of an int that torch would take for any number.
        constants = [operator.index(x) if type(x) is int else x for x in values]
        number, keeps_tail, precision = _number_of_policy(*constants)
    return CompiledFacts(
        plan.handle, name, number, rows, tail_rows if keeps_tail else 0, precision, torch.device("cpu")
    )


def _name_of_group(group: Any) -> str:
    """Traced; "" is the default group, whichever it is when the op runs."""
    if group is None:
        return ""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    return _name_of_transport(group)


# The following run while a model is traced, and what they give is a constant of the graph. Before the graph is used
# again a transport is compared by identity, other arguments by value; the environment is not looked at again.


def _assume_constant_result(function):
    """As ``torch.compiler.assume_constant_result``, without its import of the compiler, which takes a second."""
    function._dynamo_marked_constant = True
    return function


@_assume_constant_result
def _name_of_transport(transport: Any) -> str:
    transport = as_transport(transport)  # or it is no group
    for name, known in _transports.items():
        if known is transport:
            return name
    name = f"transport {next(_numbers)}"
    _transports[name] = transport
    return name


@_assume_constant_result
def _rank_in(name: str) -> int:
    return as_transport(_group_named(name)).rank


@_assume_constant_result
def _policy_of_environment() -> tuple[int, bool, torch.dtype | None]:
    return _numbered(policy_of_environment())


@_assume_constant_result
def _number_of_policy(*values: Any) -> tuple[int, bool, torch.dtype | None]:
    return _numbered(AttnPolicy(*values))


def _numbered(policy: AttnPolicy) -> tuple[int, bool, torch.dtype | None]:
    if policy not in _policies:
        _policies.append(policy)
    return _policies.index(policy), policy.hide_tail_reduce, policy.precision


# ---- what the names of an op mean -------------------------------------------------------------------


def runtime_of(handle: int, group: str, policy: int) -> AttnRuntime:
    """The runtime of a manager, or of a plan in a group. Errors as of ``held_by``."""
    held = held_by(handle)
    if isinstance(held, RuntimeManager):
        return held.dist_attn_runtime
    return held._runtime(_group_named(group), _policies[policy])


def layout_of(handle: int, group: str, local_rows: int | None = None) -> TokenLayout:
    """The layout of a manager, or of a plan in a group. ``local_rows`` are those that the model was compiled with."""
    held = held_by(handle)
    layout = held.layout if isinstance(held, RuntimeManager) else held._layout(_group_named(group))
    if local_rows is not None and local_rows != layout.num_local:
        raise ContractError(
            f"This model was compiled on a rank of {local_rows} rows, and rank {layout.rank} has {layout.num_local}: "
            "the process group is another one. Call torch._dynamo.reset() after a new init_process_group."
        )
    return layout


def held_by(handle: int) -> Any:
    """The manager or plan of this handle; ``UnknownKeyError`` if it was dropped or nobody holds it."""
    held = _held.get(handle)
    if held is None or getattr(held, "is_cleared", False):
        raise UnknownKeyError(
            "The dist attn runtime key or plan of a compiled model does not exist! clear_cache() dropped it, or nobody "
            "holds it; make it again with magi_attn_flex_key, magi_attn_varlen_key or make_plan, and hold it."
        )
    if not isinstance(held, RuntimeManager):
        _recent[handle] = held
    return held


def _group_named(name: str) -> Any:
    if not name:
        return None
    if name in _transports:
        return _transports[name]
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise ContractError(
            f"The process group {name!r} with which this model was compiled was destroyed; make a new group, and call "
            "the model with it."
        ) from error


class _RecentPlans:
    """Holds the plans that compiled models used last, because a backward may come when the caller has dropped its plan.

    As many as keys are kept, and within as many bytes.
    """

    def __init__(self) -> None:
        self._plans: DistAttnRuntimeDict | None = None

    def __setitem__(self, handle: int, plan: Any) -> None:
        if self._plans is None:
            limits = general.dist_attn_runtime_dict_size(), general.dist_attn_runtime_dict_mib() * 2**20 or None
            self._plans = DistAttnRuntimeDict(*limits)
        if handle not in self._plans:  # which counts as use
            self._plans[handle] = plan

    def clear(self) -> None:
        self._plans = None


_recent = _RecentPlans()


def forget_plans() -> None:
    """Drops the plans that nobody else holds."""
    _recent.clear()
