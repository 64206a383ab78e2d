# SPDX-License-Identifier: Apache-2.0
"""Problems with blocks of queries and keys, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def poison_unseen(
    blocks: torch.Tensor, q_block: int, k_block: int,
    of_queries: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """NaN in the rows that take part in nothing: whatever they hold must not matter.

    ``blocks`` (Hk, query blocks, key blocks), bool; ``of_queries`` are (Tq, Hq, D) and ``of_keys`` (Tk, Hk, D), and
    are changed.
    """
    sees = blocks.any(2).repeat_interleave(q_block, 1).t()
    is_seen = blocks.any(1).repeat_interleave(k_block, 1).t()
    for x in of_queries:
        x[~sees[: len(x)].repeat_interleave(x.shape[1] // len(blocks), 1)] = float("nan")
    for x in of_keys:
        x[~is_seen[: len(x)]] = float("nan")
