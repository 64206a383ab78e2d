# SPDX-License-Identifier: Apache-2.0
"""Which kernels and plans belong to a GPU: those of its family, which the calls of one backend share."""

from __future__ import annotations

from typing import NamedTuple

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.ffa.operands import CudaRuntime
from magi_attention.kernels.ffa.plans import RangePlans
from magi_attention.kernels.tables import SliceTables
from magi_attention.native.families import SM90, Family, family_of
from magi_attention.native.ffa import FfaLibrary


class FamilyKernels(NamedTuple):
    """Libraries and plans of one GPU family."""

    libraries: FfaLibraries
    plans: RangePlans
    is_portable: bool


class Gpus:
    """The kernels of each GPU, and ``runtime``, what a launch asks torch about it.

    ``library``, where given, is that of all GPUs. Kernels are looked for when a GPU is first asked for.
    """

    def __init__(
        self, library: FfaLibrary | None, runtime: CudaRuntime | None, host_planning: bool, portable: bool,
        tables: SliceTables,
    ) -> None:  # fmt: skip
        self._host_planning, self._portable, self._tables = host_planning, portable, tables
        self.given = None if library is None else self._kernels(FfaLibraries(library))
        self._of_family: dict[Family, FamilyKernels] = {}
        self._of_device: dict[int, FamilyKernels] = {}
        self.has_runtime = runtime is not None or CudaRuntime.exists()  # else nothing can be launched
        if self.has_runtime:
            self.runtime = runtime or CudaRuntime()

    def of(self, index: int) -> FamilyKernels:
        """Those of GPU ``index``; ``UnsupportedError`` if there are none."""
        return self._of_device.get(index) or self._find(index)

    def of_family(self, family: Family) -> FamilyKernels:
        """Those given, else those of ``family``."""
        if self.given is not None:
            return self.given
        found = self._of_family.get(family)
        if found is None:
            found = self._of_family[family] = self._kernels(FfaLibraries.find(family))
        return found

    def family(self, capability: tuple[int, int] | None) -> Family | None:
        """The family of GPUs of ``capability``, None if there is none; with ``portable`` that of the portable ones."""
        return family_of(capability, self._portable)

    def _find(self, index: int) -> FamilyKernels:
        family = SM90 if self.given is not None else self.family(self.runtime.capability(index))
        if family is None:
            raise UnsupportedError(f"There are no kernels for GPU {index}; ask why_not before a call.")
        found = self._of_device[index] = self.of_family(family)
        return found

    def _kernels(self, libraries: FfaLibraries) -> FamilyKernels:
        plans = RangePlans(libraries, self._host_planning, self._tables)
        return FamilyKernels(libraries, plans, libraries.family.is_portable)
