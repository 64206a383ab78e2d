# SPDX-License-Identifier: Apache-2.0
"""Keys of MSA and the call over a context-parallel group.

Tokens are dispatched as ``magi_attn_varlen_key`` dispatches causal documents of the same lengths, so dense layers may
share the layout. The index keys, keys and values of all ranks are gathered on each; it does not matter which blocks are
selected. So a rank holds them for the whole sequence during a call, and k and v until its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from magi_attention import api
from magi_attention.config import DispatchConfig, DistAttnConfig
from magi_attention.errors import ContractError
from magi_attn_extensions.MSA.config import BLOCK, MsaConfig, MsaOutput, MsaV1Inputs
from magi_attn_extensions.MSA.selection import select_packed

_SHAPE = (64, 4, 128)  # heads of q, of k, head dim of the published kernels: the plan predicts times from them


@dataclass(frozen=True)
class MagiMsaKey:
    """A packed sequence over a group. ``runtime_key`` is the key of ``magi_attention.api`` with the same layout."""

    runtime_key: Any
    cu_seqlens: tuple[int, ...]
    config: MsaConfig
    # (T,), one number for each row of this rank: its position in the document; its first key; the key before which
    # what it sees ends, 0 for a row that only pads. Then the pieces of ``select_packed``.
    positions: torch.Tensor = field(compare=False, repr=False)
    first: torch.Tensor = field(compare=False, repr=False)
    end: torch.Tensor = field(compare=False, repr=False)
    pieces: tuple[tuple[int, int, int, int], ...] = field(compare=False, repr=False)


def make_magi_msa_key(
    cu_seqlens: Sequence[int],
    cp_group_or_mesh: Any,
    *,
    config: MsaConfig | None = None,
    dispatch_config: DispatchConfig | None = None,
) -> MagiMsaKey:
    """Plans packed documents ``[0, n0, n0 + n1, ...]`` over the group; every rank makes the same plan."""
    bounds = torch.as_tensor(cu_seqlens, dtype=torch.int32).cpu()
    how = DistAttnConfig() if dispatch_config is None else DistAttnConfig(dispatch_config=dispatch_config)
    key = api.magi_attn_varlen_key(bounds, bounds, *_SHAPE, 0, cp_group_or_mesh, causal=True, dist_attn_config=how)
    rows = api.get_position_ids(key)
    host = rows.cpu()
    document = torch.searchsorted(bounds, host.int(), right=True) - 1
    pieces, start = [], 0
    for number, length in zip(*(x.tolist() for x in document.unique_consecutive(return_counts=True))):
        last = int(host[start : start + length].max()) + 1
        pieces.append((start, start + length, int(bounds[number]), last))
        start += length
    first = bounds[document].to(rows)
    end = api.dispatch(torch.arange(1, int(bounds[-1]) + 1, device=rows.device), key, pad_value=0)
    return MagiMsaKey(key, tuple(bounds.tolist()), config or MsaConfig(), rows - first, first, end, tuple(pieces))


def dispatch(x: torch.Tensor, key: MagiMsaKey, pad_value: float = 0.0) -> torch.Tensor:
    """This rank's rows of ``x`` (total, ...), which all ranks hold."""
    return api.dispatch(x, key.runtime_key, pad_value=pad_value)


def undispatch(x: torch.Tensor, key: MagiMsaKey) -> torch.Tensor:
    """The global tensor in natural order from every rank's rows; backward keeps this rank's rows of the gradient."""
    return api.undispatch(x, key.runtime_key)


def get_position_ids(key: MagiMsaKey) -> torch.Tensor:
    """int64 (T,): positions of this rank's rows in their documents; a row that only pads has that of the last token."""
    return key.positions


def calc_msa(inputs: MsaV1Inputs, key: MagiMsaKey) -> MsaOutput:
    """Block-sparse causal attention of this rank's rows; ``MsaV1Inputs`` has the shapes. Collective over the group.

    ``ContractError`` for index heads that do not fit the kv heads.
    """
    q, k, v, index_q, index_k = inputs.q, inputs.k, inputs.v, inputs.index_q, inputs.index_k
    tokens, heads = len(key.positions), k.shape[1]
    if any(len(x) != tokens for x in (q, k, v, index_q, index_k)):
        raise ContractError(f"Give {tokens} rows each, as dispatch does; q has {len(q)} and k {len(k)}.")
    if index_q.shape[1] != heads or index_k.shape[1] != 1:
        raise ContractError(
            f"index_q has {index_q.shape[1]} heads and index_k {index_k.shape[1]}; give one of index_q for each of the "
            f"{heads} kv heads, and one of index_k."
        )
    with torch.no_grad():
        positions, first, end = (x.to(q.device) for x in (key.positions, key.first, key.end))
        all_index_k = api.undispatch(index_k, key.runtime_key)
        chosen = select_packed(index_q, all_index_k, key.pieces, positions, key.config)
    if key.config.high_precision_reduce and k.dtype != torch.float64:
        k, v = k.float(), v.float()
    k, v = (api.undispatch(x, key.runtime_key, is_partial_grad=True) for x in (k, v))
    lists = api.prepare_indices(chosen, k.shape[0], k_block_size=BLOCK, k_start=first, k_end=end)
    asked = key.config
    out, _ = api.index_attn_func(
        q.to(k.dtype), k, v, lists, softmax_scale=asked.softmax_scale, deterministic=asked.deterministic
    )
    return MsaOutput(out.to(inputs.q.dtype))
