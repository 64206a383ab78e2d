# SPDX-License-Identifier: Apache-2.0
"""A picture of which rank computes which rectangle. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magi_attention.common.slices import CAUSAL, INVCAUSAL, trim
from magi_attention.compat.figures import drawn
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.meta.solver.placement import Ints


def visualize_buckets(
    bucket_per_rank: Sequence[AttnRectangles], title: str = "buckets", save_path: str | None = None
) -> None:
    """Draws the rectangles of each rank in its colour, queries downwards and keys to the right, as a PNG at
    ``save_path``, or on the screen if None. ``UnsupportedError`` without matplotlib."""
    draw_slices([bucket.to_slices() for bucket in bucket_per_rank], title, save_path)


def draw_slices(slices_per_rank: Sequence[Ints], title: str, save_path: str | None) -> None:
    """As ``visualize_buckets``, from slices ``(N, 5)`` of each rank."""
    every = np.concatenate([np.zeros((1, 5), dtype=np.int64), *slices_per_rank])
    with drawn(save_path, size=(8, 8), file_format="png") as axes:
        from matplotlib import colormaps
        from matplotlib.collections import PolyCollection

        axis = axes[0, 0]
        for rank, slices in enumerate(slices_per_rank):
            color = colormaps["hsv"](rank / max(len(slices_per_rank), 1))
            axis.add_collection(PolyCollection(_outlines(slices), facecolors=[color], label=f"rank {rank}"))
        axis.set_xlim(0, max(int(every[:, 3].max()), 1))
        axis.set_ylim(max(int(every[:, 1].max()), 1), 0)
        axis.set(title=title, xlabel="key", ylabel="query", aspect="equal")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _outlines(slices: Ints) -> list[list[tuple[int, int]]]:
    """(key, query) corners of each slice: a side along a diagonal moves by as many keys as there are rows."""
    found = []
    for q0, q1, k0, k1, kind in trim(slices).tolist():
        left_end = k0 + (q1 - q0 if kind & INVCAUSAL else 0)
        right_begin = k1 - (q1 - q0 if kind & CAUSAL else 0)
        found.append([(k0, q0), (right_begin, q0), (k1, q1), (left_end, q1)])
    return found


__all__ = ["draw_slices", "visualize_buckets"]
