# SPDX-License-Identifier: Apache-2.0
"""Checks of what callers pass."""

from __future__ import annotations

import torch

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.kernels.reference.operands import FLOAT_DTYPES


def refuse_dtensor(name: str, x: object, is_global: bool = False) -> None:
    """``ContractError`` for a DTensor, whose shape is that of all ranks together.

    ``is_global`` says that the tensor asked for has the rows of all ranks.
    """
    # why by its method: torch.distributed.tensor takes long to import, and who passes a DTensor has imported it
    if type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and hasattr(x, "to_local"):
        told = f"{name} is a DTensor of shape {tuple(x.shape)}, placed {getattr(x, 'placements', '')}; pass "
        of = "x" if " " in name else name
        if is_global:
            raise ContractError(f"{told}the whole tensor, {of}.full_tensor(), which every rank holds.")
        raise ContractError(
            f"{told}its rows on this rank, {of}.to_local(). Ranks hold the rows that plan.shard (dispatch) gave "
            "them, which a DTensor's placement does not describe."
        )


def check_tensors(**operands: object) -> None:
    """``ContractError`` for what is no tensor."""
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor):
            raise ContractError(f"{name} is a {type(x).__name__}; give a tensor (tokens, heads, head dim).")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ``ContractError`` unless the three are (tokens, heads, head dim) each and fit together."""
    check_tensors(q=q, k=k, v=v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ContractError(f"{shapes}: give (tokens, heads, head dim) each; batches are packed into tokens.")
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1]:
        raise ContractError(f"{shapes}: k and v must have the same tokens and heads.")
    if q.shape[2] != k.shape[2]:
        raise ContractError(f"{shapes}: q and k must have the same head dim.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ContractError(f"{shapes}: the number of query heads must be a multiple of that of kv heads.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOAT_DTYPES:
        raise ContractError(
            f"dtypes of q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast all three to one floating dtype."
        )
    check_devices(q, k=k, v=v)


def check_local_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, rows: int, rank: int, head_groups: int
) -> None:
    """Raises ``ContractError`` unless these are what ``rank``, with ``rows`` tokens of a plan, gives to a call.

    ``head_groups``: the kv heads for which the plan was made where each has ranks of its own, else 1.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("sink", sink)):
        refuse_dtensor(name, x)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ContractError(f"{name} is {shape}; give a tensor (local tokens, heads, head dim).")
        if x.shape[0] != rows:
            raise ContractError(
                f"{name} has {x.shape[0]} rows but rank {rank} holds {rows} tokens of this plan; "
                "pass the output of dispatch (shard), not the global tensor."
            )
        if not x.is_floating_point():
            raise ContractError(f"{name} has dtype {x.dtype}; attention needs a floating-point dtype.")
        if x.dtype != q.dtype or x.device != q.device:
            raise ContractError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; "
                "convert q, k and v to one dtype and device."
            )
    if k.shape[1] != v.shape[1] or k.shape[2] != q.shape[2]:
        raise ContractError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v need the same heads, "
            "and q and k the same head dim."
        )
    if head_groups not in (1, k.shape[1]):
        raise ContractError(
            f"The key was made for {head_groups} kv heads, each for ranks of its own, and k has {k.shape[1]}; "
            "make a key with the heads of k."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ContractError(
            f"{q.shape[1]} query heads do not divide over {k.shape[1]} key heads; "
            "the number of query heads must be a multiple of the number of key heads."
        )
    is_sink = isinstance(sink, torch.Tensor) and sink.dim() == 2 and sink.shape[1] == q.shape[1]
    if sink is not None and not is_sink:
        what = f"has shape {tuple(sink.shape)}" if isinstance(sink, torch.Tensor) else f"is a {type(sink).__name__}"
        raise ContractError(
            f"sink {what}; distributed attention unpacks a tensor (sinks, {q.shape[1]} query heads), the same on "
            "every rank."
        )


def width_of_values(k: torch.Tensor, v: torch.Tensor | None, head_dim_v: int | None) -> int:
    """Columns of the values: those of v, or with v None the first ``head_dim_v`` of k."""
    if v is not None and head_dim_v is not None:
        raise ContractError("head_dim_v says which columns of k are the values where v is None; give one of the two.")
    if v is not None:
        return v.shape[-1]
    if head_dim_v is None:
        raise ContractError("v is None: give head_dim_v, so that the first columns of k are the values, or give v.")
    width = as_int(head_dim_v, "head_dim_v", at_least=1)
    if width > k.shape[-1]:
        raise ContractError(f"head_dim_v is {width}, and k has only {k.shape[-1]} columns; give at most these.")
    return width


def check_devices(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises ``ContractError`` unless the others, each under its name, are on q's device."""
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ContractError(f"{name} is on {x.device}, q on {q.device}; move {name} to {q.device}.")
