# SPDX-License-Identifier: Apache-2.0
"""GPU families: which library of attention kernels a GPU runs, and what the library is compiled for. Plain data.

A library for 8.0 runs on 8.6 and 8.9, too, because code for a GPU runs on newer ones of the same major version. Code
with an "a" in its target runs on that GPU alone.
"""

from __future__ import annotations

from typing import NamedTuple

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


__all__ = ["BY_LIBRARY", "BY_NAME", "FAMILIES", "SM90", "Capability", "Family", "capability_of"]
__all__ += ["describe_capabilities", "family_of"]
