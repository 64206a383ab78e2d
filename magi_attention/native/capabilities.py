# SPDX-License-Identifier: Apache-2.0
"""Which backend runs on which GPU, and what has been seen of it. The table of docs/gpus.md and the doctor's words.

A row says what was run, not what should work. Change ``seen`` when somebody has run ``magi test --suite gpu`` there.
"""

from __future__ import annotations

from typing import NamedTuple

from magi_attention.native.families import Capability


class GpuRow(NamedTuple):
    """``seen``: what was run there. ``kernels`` and ``also`` are backends, those that run by default first."""

    gpus: str
    capabilities: tuple[Capability, ...]
    kernels: str
    also: str
    install: str
    seen: str


_PORTABLE = "our portable kernels (`ffa`)"
ROWS = (
    GpuRow(
        "A100, A800", ((8, 0),), _PORTABLE, "`sdpa_ol`, `sdpa`", "sm80",
        "compiled for sm_80, not run; the same source and tiles pass all tests on an H100",
    ),
    GpuRow(
        "A10, A40, RTX 30; L4, L40S, RTX 40; Orin", ((8, 6), (8, 9), (8, 7)), _PORTABLE, "`sdpa_ol`, `sdpa`", "sm80",
        "compiled for sm_80, not run; the same source and the tiles for 99 KB pass all tests on an H100",
    ),
    GpuRow(
        "H100, H200, H800, H20", ((9, 0),), "our Hopper kernels (`ffa`)",
        "portable `ffa`, `cudnn_flex`, `sdpa_ol`, `sdpa`", "sm90", "all tests, on an H100",
    ),
    GpuRow(
        "B200, GB200; B300, GB300", ((10, 0), (10, 3)), "`cudnn_flex` where it can, else our portable kernels (`ffa`)",
        "`sdpa_ol`, `sdpa`", "sm100,cudnn-flex", "compiled for sm_100, not run; `cudnn_flex` was run on an H100",
    ),
    GpuRow(
        "RTX 50, RTX PRO 6000; GB10", ((12, 0), (12, 1)), _PORTABLE, "`sdpa_ol`, `sdpa`", "sm120",
        "compiled for sm_120, not run; the same source and the tiles for 99 KB pass all tests on an H100",
    ),
)  # fmt: skip


def row_of(capability: Capability) -> GpuRow | None:
    """The row of a GPU; None where only PyTorch's kernels run."""
    return next((row for row in ROWS if capability in row.capabilities), None)


def was_run(capability: Capability) -> bool:
    """Have the kernels been run on a GPU of this compute capability?"""
    row = row_of(capability)
    return row is not None and "not run" not in row.seen


def as_markdown() -> str:
    """The table of docs/gpus.md."""
    lines = [
        "| GPUs | compute capability | runs by default | also there | `pip install` | what was run |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in row.capabilities)
        cells = (row.gpus, capabilities, row.kernels, row.also, f"`magi_attention[{row.install}]`", row.seen)
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("| any other, and no GPU | | `sdpa_ol` | `sdpa` | `magi_attention` | all tests, on CPUs |")
    return "\n".join(lines)


__all__ = ["ROWS", "GpuRow", "as_markdown", "row_of", "was_run"]
