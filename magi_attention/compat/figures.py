# SPDX-License-Identifier: Apache-2.0
"""Pictures of the published functions, to a file or to the screen. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from magi_attention.errors import UnsupportedError


def pyplot() -> Any:
    """``UnsupportedError`` without matplotlib."""
    try:
        from matplotlib import pyplot as found
    except ImportError:
        raise UnsupportedError("Plots need matplotlib; run `pip install matplotlib`.") from None
    return found


@contextmanager
def drawn(
    *paths: str | Path | None,
    size: tuple[float, float],
    grid: tuple[int, int] = (1, 1),
    show: bool | None = None,
    file_format: str | None = None,
) -> Iterator[Any]:
    """Axes ``(rows, columns)`` of a figure of ``size`` inches. What the body has drawn is written to each path that is
    not None, as ``file_format`` or as its suffix says; it is shown if ``show``, by default where there is no path."""
    plt = pyplot()
    figure, axes = plt.subplots(*grid, figsize=size, squeeze=False)
    try:
        yield axes
        files = [path for path in paths if path is not None]
        for path in files:
            figure.savefig(path, bbox_inches="tight", format=file_format)
        if not files if show is None else show:
            plt.show()
    finally:
        plt.close(figure)
