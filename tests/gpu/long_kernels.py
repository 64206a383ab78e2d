# SPDX-License-Identifier: Apache-2.0
"""Other work for tests of kernels whose CTAs wait for one another."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def beside_long_kernels(calls: int = 12) -> Iterator[int]:
    """The numbers of so many calls. Before each, up to three float32 products start on another stream, which hold
    multiprocessors longer than a work tile takes, so CTAs come one by one. All has ended after the last."""
    noise, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for n in range(calls):
        with torch.cuda.stream(side):
            for _ in range(n % 4):
                torch.mm(noise, noise)
        yield n
    torch.cuda.synchronize()
