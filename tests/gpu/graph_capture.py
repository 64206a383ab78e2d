# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(step: Callable[[], Any], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
    """A graph of ``step``, what the last warm-up on another stream gave, and what each replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            before = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = step()
    return graph, before, written
