# SPDX-License-Identifier: Apache-2.0
"""GPU families: which library of attention kernels a GPU runs, what it is compiled for, and what was run where.

Plain data, which the builds read without torch.

A library for 8.0 runs on 8.6 and 8.9, too, because code for a GPU runs on newer ones of the same major version. Code
with an "a" in its target runs on that GPU alone.
"""

from __future__ import annotations

from typing import NamedTuple

from magi_attention.native import install as pip

Capability = tuple[int, int]


class Family(NamedTuple):
    """One library of attention kernels.

    ``name`` is what builds and wheels call it, ``target`` its code. ``sources`` is the folder of its kernels below
    ``csrc/ffa``: ``portable`` kernels keep to instructions that all GPUs from 8.0 on have.
    """

    name: str
    sources: str
    target: str
    capabilities: tuple[Capability, ...]

    @property
    def library(self) -> str:
        return f"ffa_{self.name}"

    @property
    def is_portable(self) -> bool:
        return self.sources == "portable"

    @property
    def gencode(self) -> str:
        """The flag of nvcc."""
        return f"-gencode=arch=compute_{self.target[3:]},code={self.target}"


SM90 = Family("sm90", "sm90", "sm_90a", ((9, 0),))
FAMILIES = (
    SM90,
    Family("sm80", "portable", "sm_80", ((8, 0), (8, 6), (8, 7), (8, 9))),
    Family("sm100", "portable", "sm_100", ((10, 0), (10, 3))),
    Family("sm120", "portable", "sm_120", ((12, 0), (12, 1))),
    Family("portable_sm90", "portable", "sm_90", ((9, 0),)),  # to test and compare; in no wheel
)
BY_NAME = {family.name: family for family in FAMILIES}
BY_LIBRARY = {family.library: family for family in FAMILIES}


def family_of(capability: Capability | None, portable: bool = False) -> Family | None:
    """The family whose kernels a GPU of this compute capability runs; None if there is none.

    With ``portable`` only families of portable kernels count, which a 9.0 GPU runs otherwise only if asked to.
    """
    fits = (f for f in FAMILIES if capability in f.capabilities and (f.is_portable or not portable))
    return next(fits, None)


def capability_of(arch: str) -> Capability:
    """(8, 6) of "sm86", (12, 0) of "sm120"."""
    number = int(arch.removeprefix("sm"))
    return number // 10, number % 10


def describe_capabilities() -> str:
    """All compute capabilities that have kernels, such as "8.0, 8.6, 9.0"."""
    known = sorted({c for family in FAMILIES for c in family.capabilities})
    return ", ".join(f"{major}.{minor}" for major, minor in known)


# ---- what was run where: the tables of pages and the doctor's words. A row says what was run, not what should
# work; change ``seen`` when somebody has run ``magi test --suite gpu`` there.


class GpuRow(NamedTuple):
    """``seen``: what was run there. ``kernels`` and ``also`` are backends, those that run by default first."""

    gpus: str
    capabilities: tuple[Capability, ...]
    kernels: str
    also: str
    install: str
    seen: str


_PORTABLE = "our portable kernels (`ffa`)"
GPU_ROWS = (
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
        "portable `ffa`, `cudnn_flex`, `fa4`, `sdpa_ol`, `sdpa`", "sm90", "all tests, on an H100",
    ),
    GpuRow(
        "B200, GB200; B300, GB300", ((10, 0), (10, 3)),
        "`cudnn_flex` where it can, else `fa4`, else our portable kernels (`ffa`)",
        "`sdpa_ol`, `sdpa`", "sm100,cudnn-flex,fa4",
        "compiled for sm_100, not run; `cudnn_flex` and `fa4` were run on an H100",
    ),
    GpuRow(
        "RTX 50, RTX PRO 6000; GB10", ((12, 0), (12, 1)), _PORTABLE, "`sdpa_ol`, `sdpa`", "sm120",
        "compiled for sm_120, not run; the same source and the tiles for 99 KB pass all tests on an H100",
    ),
)  # fmt: skip


def row_of(capability: Capability) -> GpuRow | None:
    """The row of a GPU; None where only PyTorch's kernels run."""
    return next((row for row in GPU_ROWS if capability in row.capabilities), None)


def was_run(capability: Capability) -> bool:
    """Have the kernels been run on a GPU of this compute capability?"""
    row = row_of(capability)
    return row is not None and "not run" not in row.seen


def gpu_table() -> str:
    """The table of docs/gpus.md."""
    lines = [
        "| GPUs | compute capability | runs by default | also there | to install | what was run |",
        "|---|---|---|---|---|---|",
    ]
    for row in GPU_ROWS:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in row.capabilities)
        cells = (row.gpus, capabilities, row.kernels, row.also, f"`magi_attention[{row.install}]`", row.seen)
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("| any other, and no GPU | | `sdpa_ol` | `sdpa` | `magi_attention` | all tests, on CPUs |")
    return "\n".join(lines)


def install_table() -> str:
    """The table of README.md and docs/install.md: what each GPU installs."""
    lines = ["| your GPU | command |", "|---|---|", f"| none, or none of these | `{pip.table_line('')}` |"]
    for install in dict.fromkeys(row.install for row in GPU_ROWS):
        gpus = "; ".join(row.gpus for row in GPU_ROWS if row.install == install)
        of_others = [extra for extra in install.split(",") if extra in pip.NEEDS]
        first = f"`{pip.needs(*of_others)}`, then " if of_others else ""
        lines.append(f"| {gpus} | {first}`{pip.table_line(install)}` |")
    return "\n".join(lines)
