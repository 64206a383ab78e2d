# SPDX-License-Identifier: Apache-2.0
"""Does a plan of one stage wait for its rows? Asked of tensors; the rule is ``meta.predict.cost.is_wait_cheaper``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.meta.predict.cost import is_wait_cheaper


def is_joined_faster(rows: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_one_host: bool) -> bool:
    """``rows``: the most that a rank fetches. q (T, Hq, D), k (T, Hk, D) and v (T, Hk, Dv) are those of any rank."""
    row_bytes = k.shape[1] * (k.shape[2] + v.shape[2]) * k.element_size()
    return is_wait_cheaper(rows * row_bytes, q.shape[0] * q.shape[1] * v.shape[2], is_one_host)


def are_on_one_host(ranks: Sequence[int], ranks_of_host: int | None) -> bool:
    """Whether one host has all global ``ranks``, which the launcher numbers host by host. False if the launcher does
    not say how many ranks a host has."""
    return ranks_of_host is not None and len({rank // ranks_of_host for rank in ranks}) == 1
