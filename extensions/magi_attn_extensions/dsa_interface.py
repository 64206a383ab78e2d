# SPDX-License-Identifier: Apache-2.0
"""Per-token top-k sparse attention, as the published extension names it."""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError
from magi_attention.functional import index_attn_func
from magi_attention.kernels.index_attn import prepare_indices

# published backend -> is it of the newer releases, whose indices are (Tq, Hk, top-k)?
BACKENDS = {
    "flex": False,
    "sdpa": False,
    "ffa": False,
    "ffa_sparse_load": False,
    "ffa_index_attn": False,
    "ffa_index_sparse": True,
    "ffa_block_sparse": True,
}


def dsa_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_map: torch.Tensor | None = None,
    softmax_scale: float | None = None, backend: str = "flex", *, index_sparse_indices: torch.Tensor | None = None,
    deterministic: bool = False, sparse_k_block_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each query attends to its own list of keys: ``(out (Tq, Hq, Dv), lse (Tq, Hq))``, both with gradients.

    Args:
        q: (Tq, Hq, D). k: (Tk, Hk, D). v: (Tk, Hk, Dv).
        index_map: integer (Hk, Tq, top-k): rows of k, -1 for none, in any order; one listed twice counts once.
        index_sparse_indices: the same as (Tq, Hk, top-k), in place of ``index_map``; the form of newer releases, and
            of ``index_map`` with the backends that only these have, ``ffa_index_sparse`` and ``ffa_block_sparse``.
        backend: any published name. ``index_attn_func`` is behind all of them, on CPUs and GPUs.
            With ``ffa_block_sparse`` an index is the number of a block of ``sparse_k_block_size`` keys.
        deterministic: as of ``index_attn_func``.

    Raises:
        ContractError: an unknown backend, shapes that do not fit together, an index beyond k.
    """
    if backend not in BACKENDS:
        raise ContractError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}.")
    if (index_map is None) == (index_sparse_indices is None):
        raise ContractError("Give either index_map or index_sparse_indices, exactly one of the two.")
    indices = index_sparse_indices
    if index_map is not None:
        indices = index_map if BACKENDS[backend] else index_map.transpose(0, 1)
    if backend == "ffa_block_sparse":
        indices = prepare_indices(indices, k.shape[0], k_block_size=sparse_k_block_size)
    out, meta = index_attn_func(q, k, v, indices, softmax_scale=softmax_scale, deterministic=deterministic)
    return out, meta.lse
