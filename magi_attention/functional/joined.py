# SPDX-License-Identifier: Apache-2.0
"""Whether a plan of one stage waits for its rows and runs one kernel, because that ends sooner than two kernels.

Two kernels hide the rows behind the first. But partial outputs go through memory in float32 and are merged, and so are
partial dq. What that takes depends on the queries alone, so it is waste where few rows travel, as under windows and
packed documents, or over fast links (``docs/log/rows_and_stages.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Two kernels take so much longer than one for each value of the output: 0.75 ms for 8,192 tokens and 64 heads of dim
# 128 on an H100.
MERGE_SECONDS = 11e-12
# All-to-all-v moves so many bytes between GPUs of a host, and each GPU's link to other hosts so many
# (``magi_attention/simulate/machine.py``).
HOST_BYTES_PER_S, NETWORK_BYTES_PER_S = 210e9, 50e9


def is_joined_faster(rows: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_one_host: bool) -> bool:
    """``rows``: the most that a rank fetches. q (T, Hq, D), k (T, Hk, D) and v (T, Hk, Dv) are those of any rank."""
    row_bytes = k.shape[1] * (k.shape[2] + v.shape[2]) * k.element_size()
    travel = rows * row_bytes / (HOST_BYTES_PER_S if is_one_host else NETWORK_BYTES_PER_S)
    return travel <= q.shape[0] * q.shape[1] * v.shape[2] * MERGE_SECONDS


def are_on_one_host(ranks: Sequence[int], ranks_of_host: int | None) -> bool:
    """Whether one host has all global ``ranks``, which the launcher numbers host by host. False if the launcher does
    not say how many ranks a host has."""
    return ranks_of_host is not None and len({rank // ranks_of_host for rank in ranks}) == 1


__all__ = ["are_on_one_host", "is_joined_faster"]
