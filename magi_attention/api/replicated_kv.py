# SPDX-License-Identifier: Apache-2.0
"""Cross-attention whose queries are spread over ranks and whose keys every rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from magi_attention.api.compiled.handles import layout_of
from magi_attention.api.plan import Plan, check_plan
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.infer import CuSeqlens
from magi_attention.env import general
from magi_attention.functional import flex_flash_attn_func
from magi_attention.functional.calls.inputs import refuse_dtensor
from magi_attention.functional.tokens.replicated_kv import replicated_ranges


def attend_replicated_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    cu_seqlens_k: CuSeqlens,
    group: Any = None,
    *,
    cu_seqlens_q: CuSeqlens | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of this rank's tokens over keys that every rank holds, as from video tokens to a text.

    q ``(T, Hq, D)`` holds this rank's ``T`` tokens (``plan.shard``), k ``(Tk, Hk, D)`` and v ``(Tk, Hk, Dv)`` all keys,
    the same on all ranks. Query document i sees the whole of key document i: ``cu_seqlens_k`` is ``[0, m0, m0 + m1,
    ..., Tk]``, ``cu_seqlens_q`` the same of the whole query sequence, by default the documents of the plan's mask.
    Lists or CPU tensors: one on a GPU is copied to the host. The plan's mask itself plays no part.

    Returns out ``(T, Hq, Dv)`` in q's dtype and ``AttnForwardMeta`` with lse ``(T, Hq)``. Rows that see no key, as pad
    rows, have out 0 and lse -inf. ``softmax_scale``, ``softcap`` and ``deterministic`` as of ``flex_flash_attn_func``,
    which runs over this rank's ranges; nothing is sent, and ranks need not call together.

    Gradients of k and v are those of this rank's queries: partial, as those of parameters after ``attend``. So
    parameters that made k and v on every rank are right after the one sum over ranks that all parameters get
    (``sum_gradients``, ``set_gradient_sum``). For k and v that parameters do not make, sum ``k.grad`` over the group.

    ``ContractError`` if rows, documents and plan do not fit together.
    """
    check_plan(plan)
    refuse_dtensor("q", q)
    refuse_dtensor("k", k, is_global=True)
    refuse_dtensor("v", v, is_global=True)
    rows = q.shape[0], k.shape[0]
    if is_compiling():
        cu_q, cu_k = (None if cu is None else torch.as_tensor(cu) for cu in (cu_seqlens_q, cu_seqlens_k))
        facts = plan._facts(group)
        ranges = replicated_ranges_op(cu_q, cu_k, facts.handle, facts.group, *rows)
    else:
        ranges = replicated_ranges(plan._layout(group), cu_seqlens_q, cu_seqlens_k, *rows)
    if deterministic is None:
        deterministic = general.is_deterministic_mode_enable()
    return flex_flash_attn_func(
        q, k, v, ranges[:, :2], ranges[:, 2:], softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic
    )


@torch.library.custom_op(
    "magi_attention::replicated_ranges", mutates_args=(),
    schema="(Tensor? cu_q, Tensor cu_k, SymInt handle, str group, SymInt q_rows, SymInt k_rows) -> Tensor",
)  # fmt: skip
def replicated_ranges_op(cu_q, cu_k, handle, group, q_rows, k_rows):
    """As ``functional.tokens.replicated_kv`` has it, for a compiled model, which knows no number of ranges ahead."""
    return replicated_ranges(layout_of(handle, group), cu_q, cu_k, q_rows, k_rows).clone()


@replicated_ranges_op.register_fake
def _(cu_q, cu_k, handle, group, q_rows, k_rows):
    return torch.empty((torch.library.get_ctx().new_dynamic_size(), 4), dtype=torch.int32)
