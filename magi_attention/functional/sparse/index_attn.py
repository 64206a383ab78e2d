# SPDX-License-Identifier: Apache-2.0
"""``index_attn_func``: attention of each query to a list of keys of its own, on one device, with gradients."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.scalars import as_float, as_int
from magi_attention.errors import ContractError
from magi_attention.functional.calls.autocast import cast_operands
from magi_attention.functional.calls.inputs import check_devices, check_qkv, width_of_values
from magi_attention.kernels.index_attn import PreparedIndices, has_kernel, prepare_indices, with_kept_readers
from magi_attention.kernels.index_attn.custom_ops import call_index_fwd
from magi_attention.kernels.index_attn.prepare import check_tensor
from magi_attention.kernels.reference.correction import check_sink
from magi_attention.kernels.types import as_scale, options_of


def index_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    indices: torch.Tensor | PreparedIndices,
    *,
    head_dim_v: int | None = None,
    sink: torch.Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Attention of each query to a list of keys of its own, as top-k attention chooses them (DSA).

    Query t sees, in the ``Hq / Hk`` heads of kv head h, the rows ``indices[t, h]`` of k. One whose list is empty gives
    out 0, lse -inf and gradients 0. Inputs may have any strides. Under ``torch.compile(fullgraph=True)`` the call is
    one custom op, and one more that prepares the lists.

    Args:
        q: (Tq, Hq, D). k: (Tk, Hk, D). v: (Tk, Hk, Dv). One floating dtype, Hq a multiple of Hk.
        head_dim_v: Dv where v is None: the first so many columns of k are the values, as in MLA's latents. The gradient
            of k then holds that of the values.
        indices: int32 or int64 (Tq, Hk, N): rows of k in any order. Negative entries are none, wherever they stand, and
            a key that is there twice counts once. Or what ``prepare_indices`` made of such lists: so layers that share
            lists sort them once, and lists of blocks of keys are given.
        sink, sink_layout, softmax_scale, softcap, deterministic, sm_margin, return_max_logits: as of
            ``flex_flash_attn_func``.

    Returns:
        ``(out, meta)``: out (Tq, Hq, Dv) in q's dtype; ``meta.lse`` (Tq, Hq) and ``meta.max_logits`` (Hq,) or None,
        float32 (float64 for float64 inputs). lse is differentiable as out is, max_logits has no gradient.

    Raises:
        ContractError: shapes, dtypes or devices that do not fit together, and an entry beyond k; ``prepare_indices``
            says when such entries are looked for on a GPU.
        NoBackendError: the backend asked for by environment cannot run the problem.
    """
    q, k, v = cast_operands(q, k, v)
    check_qkv(q, k, k if v is None else v)
    width = width_of_values(k, v, head_dim_v)
    if not isinstance(indices, PreparedIndices):
        check_tensor(indices, ", or what prepare_indices made")
        if tuple(indices.shape[:2]) != (q.shape[0], k.shape[1]):
            raise ContractError(
                f"indices are {tuple(indices.shape)} with q {tuple(q.shape)} and k {tuple(k.shape)}; give integers "
                f"({q.shape[0]} queries, {k.shape[1]} kv heads, keys)."
            )
        indices = prepare_indices(indices.to(q.device), k.shape[0])
    return attend_lists(
        q, k, v, indices, head_dim_v=width, sink=sink, sink_layout=sink_layout, softmax_scale=softmax_scale,
        softcap=softcap, deterministic=deterministic, sm_margin=sm_margin, return_max_logits=return_max_logits,
    )  # fmt: skip


def attend_lists(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices, *, head_dim_v: int,
    sink: torch.Tensor | None, sink_layout: str, softmax_scale: float | None, softcap: float, deterministic: bool,
    sm_margin: int, return_max_logits: bool,
) -> tuple[torch.Tensor, AttnForwardMeta]:  # fmt: skip
    """``index_attn_func`` of q, k and v that ``check_qkv`` has passed, with ``width_of_values`` of k and v."""
    wanted = (lists.num_lists(q.shape[0]), k.shape[1])
    if tuple(lists.counts.shape) != wanted or lists.total_k != k.shape[0]:
        raise ContractError(
            f"The prepared lists are {tuple(lists.counts.shape)} for (lists, kv heads) and {lists.total_k} keys, but q "
            f"and k ask for {wanted} and {k.shape[0]}; prepare the lists of these tensors."
        )
    check_devices(q, indices=lists.rows, sink=sink)
    if sink is not None:
        check_sink(sink, q.shape[0], q.shape[1], sink_layout)
    needs_backward = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (v is not None and v.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
    scale = q.shape[2] ** -0.5 if softmax_scale is None else as_scale(softmax_scale)
    softcap, sm_margin = as_float(softcap, "softcap"), as_int(sm_margin, "sm_margin")
    if deterministic and needs_backward and not is_compiling():
        options = options_of(scale, softcap, sink_layout, True, sm_margin, bool(return_max_logits))
        if has_kernel(q, k, v, options, lists, sink, True, head_dim_v):
            lists = with_kept_readers(lists)
    out, lse, max_logits = call_index_fwd(
        q, k, v, head_dim_v, *lists.operands, sink, sink_layout, scale, softcap, bool(deterministic), sm_margin,
        bool(return_max_logits), needs_backward,
    )  # fmt: skip
    return out, AttnForwardMeta(lse, max_logits if return_max_logits else None)
