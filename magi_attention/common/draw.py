# SPDX-License-Identifier: Apache-2.0
"""Pictures of matrices; needs matplotlib, which is imported when drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magi_attention.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def draw_matrix(matrix: NDArray[np.bool_], save_path: str | None = None, title: str = "") -> None:
    """Draws ``(rows, columns)`` to ``save_path``, or on the screen if None.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise UnsupportedError("Drawing needs matplotlib; run `pip install matplotlib`.") from None
    figure, axes = plt.subplots(figsize=(8, 8))
    axes.imshow(matrix, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set_title(title)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if save_path is None:
        plt.show()
    else:
        figure.savefig(save_path, bbox_inches="tight")
    plt.close(figure)
