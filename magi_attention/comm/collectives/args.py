# SPDX-License-Identifier: Apache-2.0
"""Arguments of the group collectives: from the published forms to a GroupSpec, with every check."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.transport.base import Transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.errors import ContractError, PlanMismatchError

Tensors = torch.Tensor | Sequence[torch.Tensor]

_PREFIXES = ("", "a2av_", "hier_", "native_")
_OPTIONS = ("layout", "check", "intra_group", "inter_group", "native", "config")
# accepted for the sake of one call site for all implementations; they tune others than this one
_OTHERS = (
    *("buffer_name", "kernel_barrier", "split_alignment", "native_grpcoll_handle_dict", "t2r_idx"),
    *("native_group_cast_meta_dict", "native_group_reduce_meta_dict"),
    *("output_seqlen", "internode_output_seqlen", "deterministic"),
)


def read_options(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of this implementation among ``kwargs``; warns about names that no implementation knows."""
    options: dict[str, Any] = dict.fromkeys(_OPTIONS)
    for key, value in kwargs.items():
        plain = next((key[len(p) :] for p in reversed(_PREFIXES) if key.startswith(p)), key)
        if plain in options:
            options[plain] = value
        elif plain not in _OTHERS and key not in _OTHERS:
            warnings.warn(f"{name} ignores the unknown argument {key}; remove it.", stacklevel=3)
    return options


def as_tensors(value: Tensors | None, name: str) -> list[torch.Tensor]:
    """One tensor or several with the same number of rows, as a list, outside autograd."""
    tensors = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ContractError(f"{name} is {value!r}; pass a tensor (rows, ...), or a list of tensors.")
    if not all(isinstance(x, torch.Tensor) and x.ndim for x in tensors):
        raise ContractError(f"{name} must hold tensors with at least one dim, the rows.")
    if len({(x.shape[0], x.device) for x in tensors}) > 1:
        raise ContractError(
            f"The tensors of {name} have shapes {[tuple(x.shape) for x in tensors]}; they must have the same "
            "number of rows (dim 0) and lie on one device."
        )
    return [x.detach() for x in tensors]


def check_pairing(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], same_dtype: bool) -> None:
    """Each input needs an output with the same trailing dims on the same device (and dtype, for a cast)."""
    if len(inputs) != len(outputs):
        raise ContractError(f"{len(inputs)} inputs but {len(outputs)} outputs; give one output per input.")
    for x, y in zip(inputs, outputs):
        if x.shape[1:] != y.shape[1:] or x.device != y.device or (same_dtype and x.dtype != y.dtype):
            raise ContractError(
                f"Input {tuple(x.shape)} {x.dtype} on {x.device} does not fit output {tuple(y.shape)} "
                f"{y.dtype} on {y.device}; device, trailing dims{' and dtype' * same_dtype} must be equal."
            )


def check_lse(data: Sequence[torch.Tensor], lse: torch.Tensor | None, name: str, reason: str) -> torch.Tensor:
    """``lse`` as (rows, heads) float32 or float64 for data (rows, heads, dim)."""
    if lse is None:
        raise ContractError(f"{reason} needs {name}; pass a float32 tensor (rows, heads).")
    for x in data:
        if x.ndim != 3 or lse.shape != x.shape[:2]:
            raise ContractError(
                f"{name} {tuple(lse.shape)} does not fit data {tuple(x.shape)}; lse is (rows, heads) and "
                "data (rows, heads, dim)."
            )
    if lse.dtype not in (torch.float32, torch.float64):
        raise ContractError(f"{name} is {lse.dtype}; use float32 or float64.")
    return lse.detach()


def check_reduce(
    op: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], comm_dtype: torch.dtype | None
) -> list[torch.dtype]:
    """Checks operation and dtypes; returns the dtype of each tensor on the wire."""
    if op not in ("sum", "avg", "lse"):
        raise ContractError(f"Reduce operation {op!r} is unknown; use 'sum', 'avg' or 'lse'.")
    for x in (*inputs, *outputs):
        if x.dtype == torch.bool or (op != "sum" and not x.is_floating_point()):
            raise ContractError(f"A group reduce with {op!r} of {x.dtype} is not defined; use a float dtype.")
    for x, y in zip(inputs, outputs):
        if x.is_floating_point() != y.is_floating_point():
            raise ContractError(f"Contributions {x.dtype} cannot be added into {y.dtype}; use like dtypes.")
    if comm_dtype is not None and any(x.is_floating_point() != comm_dtype.is_floating_point for x in inputs):
        raise ContractError(f"comm_dtype {comm_dtype} would change the kind of the data; use a like dtype.")
    return [comm_dtype or x.dtype for x in inputs]


def make_cast_spec(
    transport: Transport,
    input_splits: Any,
    output_splits: Any,
    dst_indices: Any,
    src_index: Any,
    names: tuple[str, str, str, str],
) -> GroupSpec:
    """A GroupSpec from host lists or tensors. ``names`` are what the caller calls the four, for errors."""
    in_sizes, out_sizes = _sizes(input_splits, names[0]), _sizes(output_splits, names[1])
    many = [
        [r for r in _sizes(row, names[2]) if r != -1 or not isinstance(dst_indices, torch.Tensor)]
        for row in _items(dst_indices, names[2])
    ]
    single = _sizes(src_index, names[3])
    if isinstance(src_index, torch.Tensor):  # padded with the world size where nothing arrives
        kept = [i for i, r in enumerate(single) if r != transport.size or i >= len(out_sizes) or out_sizes[i]]
        dropped = len(single) - len(kept)
        if len(out_sizes) == len(single):
            out_sizes = [out_sizes[i] for i in kept]
        single = [single[i] for i in kept] if dropped else single
    return GroupSpec.make(transport.rank, transport.size, in_sizes, many, out_sizes, single)


def _items(value: Any, name: str) -> list:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ContractError(f"{name} is {value!r}; pass a list or a tensor.")
    return list(value)


def _sizes(value: Any, name: str) -> list[int]:
    items = _items(value, name)
    if any(not isinstance(n, int) or isinstance(n, bool) for n in items):
        raise ContractError(f"{name} must hold integers, not {items!r}.")
    return items


def check_rows(name: str, rows: int, total: int, tail_allowed: bool) -> None:
    if rows > total or (rows < total and not tail_allowed):
        raise ContractError(
            f"The {name} split sizes add up to {rows} but the {name} has {total} rows; they must cover it."
        )


def compare_ranks(transport: Transport, counts: tuple[list[int], list[int]], signature: tuple) -> list[list[int]]:
    """Compares the arguments of all ranks: rows that i sends to j with rows that j expects of i, then the
    signatures (operation, dtypes, trailing dims). All ranks see the same data, so all raise alike.

    Returns:
        Rows that each rank sends to each.
    """
    everyone = transport.all_gather_object((counts, signature))
    for i, ((sends, _), _) in enumerate(everyone):
        for j, ((_, expects), _) in enumerate(everyone):
            if sends[j] != expects[i]:
                raise PlanMismatchError(
                    f"Rank {i} sends {sends[j]} rows to rank {j}, which expects {expects[i]} of it. Compare "
                    "the plans (or splits and index lists) of these two ranks."
                )
    for r, (_, other) in enumerate(everyone):
        if other != everyone[0][1]:
            raise PlanMismatchError(
                f"Rank 0 calls with {everyone[0][1]} and rank {r} with {other}; operation, dtypes and "
                "trailing dims must be the same on all ranks."
            )
    return [sends for (sends, _), _ in everyone]


def counts_of_spec(spec: GroupSpec) -> tuple[list[int], list[int]]:
    """(rows for each rank, rows from each rank) of a cast, this rank itself included."""
    sends, expects = [0] * spec.world, [0] * spec.world
    for size, dsts in zip(spec.input_splits, spec.dst_indices):
        for r in dsts:
            sends[r] += size
    for size, src in zip(spec.output_splits, spec.src_index):
        expects[src] += size
    return sends, expects


def counts_of_layout(layout: A2AVLayout) -> tuple[list[int], list[int]]:
    sends, expects = list(layout.send_counts), list(layout.recv_counts)
    sends[layout.rank] = expects[layout.rank] = layout.self_in.count
    return sends, expects


def is_check_on(check: bool | None) -> bool:
    """``check`` if given, else what MAGI_ATTENTION_SANITY_CHECK says."""
    if check is not None:
        return check
    from magi_attention.env import general

    return general.is_sanity_check_enable()
