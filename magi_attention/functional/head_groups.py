# SPDX-License-Identifier: Apache-2.0
"""Rows of a plan by head groups: (T, G * H, ...) with all groups of a token beside one another, and (G * T, H, ...)."""

from __future__ import annotations

import torch


def rows_by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(T, G * H, ...) as (G * T, H, ...), one group behind the other; ``x`` itself for one group."""
    return x if groups == 1 else x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)


def heads_by_token(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of ``rows_by_group``, contiguous."""
    return x if groups == 1 else x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)


__all__ = ["heads_by_token", "rows_by_group"]
