# SPDX-License-Identifier: Apache-2.0
"""Grouping of slices that share a range, so that one tile can walk all of its partners."""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError


def merge_ranges(
    outer_ranges: torch.Tensor, inner_ranges: torch.Tensor, attn_type_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Sorts N slices by outer range and collapses equal outer ranges. No host synchronisation.

    Args:
        outer_ranges, inner_ranges: (N, 2) integer. The first are q ranges forward, k ranges backward.
        attn_type_map: (N,) integer, or None.

    Returns:
        ``(merged_outer, sorted_outer, sorted_inner, sorted_types, range_map, unique_count)``: the sorted
        arrays are ordered by outer start, then end, and stable. Group ``g < unique_count`` has the outer
        range ``merged_outer[g]`` and the sorted slices ``[range_map[g], range_map[g + 1])``.
        ``merged_outer`` (N, 2) is 0 and ``range_map`` (N + 1,) int32 is N beyond the groups;
        ``unique_count`` is int32 (1,) on the device of the ranges.
    """
    n = len(outer_ranges)
    if inner_ranges.shape != outer_ranges.shape or outer_ranges.shape != (n, 2):
        raise ContractError(
            f"Ranges are {tuple(outer_ranges.shape)} and {tuple(inner_ranges.shape)}; give (N, 2) for both."
        )
    if attn_type_map is not None and attn_type_map.shape != (n,):
        raise ContractError(f"attn_type_map is {tuple(attn_type_map.shape)}; give one type for each of {n} slices.")
    by_end = torch.argsort(outer_ranges[:, 1], stable=True)
    order = by_end[torch.argsort(outer_ranges[by_end, 0], stable=True)]
    sorted_outer, sorted_inner = outer_ranges[order], inner_ranges[order]
    sorted_types = None if attn_type_map is None else attn_type_map[order]
    is_new = torch.ones(n, dtype=torch.bool, device=outer_ranges.device)
    is_new[1:] = (sorted_outer[1:] != sorted_outer[:-1]).any(1)
    group = torch.cumsum(is_new, 0) - 1
    merged_outer = torch.zeros_like(sorted_outer)
    merged_outer[group] = sorted_outer  # all writers of one place write the same value
    place = torch.arange(n, dtype=torch.int32, device=outer_ranges.device)
    range_map = torch.full((n + 1,), n, dtype=torch.int32, device=outer_ranges.device)
    range_map.scatter_reduce_(0, group, place, "amin")
    unique_count = is_new.sum(dtype=torch.int32).reshape(1)
    return merged_outer, sorted_outer, sorted_inner, sorted_types, range_map, unique_count
