# SPDX-License-Identifier: Apache-2.0
"""Checks of what callers pass."""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError


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
