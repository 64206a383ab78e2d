# SPDX-License-Identifier: Apache-2.0
"""Which library holds a kernel: the one built ahead, else one that is compiled for it at first use.

The library built ahead may hold a part of the manifest, or not be there at all. What it lacks is compiled by
``native.jit`` into a cache that other processes share; a log line says what and where. All this happens when a call is
prepared for the first time, so a repeated call costs nothing more.
"""

from __future__ import annotations

import torch

from magi_attention.env import build as env
from magi_attention.errors import BuildError, UnsupportedError
from magi_attention.kernels.ffa.operands import DTYPES
from magi_attention.native.families import SM90, Family
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.loader import why_absent
from magi_attention.native.toolchain import PLANNER

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


class FfaLibraries:
    """The kernel libraries of one GPU family.

    ``ahead`` is the one built ahead, or None and ``why`` a sentence about that; with ``is_misfit`` there is one, which
    cannot be used.

    ``kind`` is "fwd" or "bwd" everywhere.
    """

    def __init__(self, ahead: FfaLibrary | None, why: str = "", family: Family = SM90, is_misfit: bool = False) -> None:
        self._ahead = ahead
        self._why = why
        self.family = family
        self._is_misfit = is_misfit
        self._compiled: FfaLibrary | None = None  # the last one
        self._refusals: dict[tuple[object, ...], str | None] = {}

    @classmethod
    def find(cls, family: Family = SM90) -> FfaLibraries:
        """Those of this installation. Touches no GPU."""
        try:
            return cls(FfaLibrary.ahead(family), family=family)
        except UnsupportedError as error:
            return cls(None, str(error), family, FfaLibrary.is_ahead(family))

    @property
    def at_hand(self) -> FfaLibrary:
        """One that is loaded already; tiles and planners are the same in all.

        Raises:
            UnsupportedError: nothing is built ahead and nothing was asked for yet.
        """
        library = self._ahead or self._compiled
        if library is None:
            raise UnsupportedError(self._why)
        return library

    def why_not(self, kinds: tuple[str, ...], dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str | None:
        """None if the kernels of ``kinds`` are built or can be compiled here, else a sentence. Compiles nothing."""
        if self._is_misfit:
            return self._why
        key = (kinds, dtype, head_dim, head_dim_v)
        if key not in self._refusals:
            missing = [self._why_no_kernel(kind, dtype, head_dim, head_dim_v) for kind in kinds]
            reasons = [why_absent(PLANNER), *missing]
            self._refusals[key] = next((reason for reason in reasons if reason is not None), None)
        return self._refusals[key]

    def _why_no_kernel(self, kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str | None:
        if self._has(kind, dtype, head_dim, head_dim_v):
            return None
        from magi_attention.native import jit  # the compiler drivers, which most runs do not need

        reason = jit.why_not(_NAMES[dtype], head_dim, head_dim_v, self.family.name, kind=kind)
        if reason is None:
            return None
        return f"{self._lack(kind, dtype, head_dim, head_dim_v)} It cannot be compiled at first use either. {reason}"

    def get(self, kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> FfaLibrary:
        """The library with a kernel for these head dims; may compile it, with a log line before.

        With MAGI_ATTENTION_FORCE_JIT_BUILD=1 that is never the one built ahead.

        Raises:
            BuildError: it had to be compiled, and could not be. UnsupportedError: what was compiled does not load.
        """
        if not env.is_force_jit_build() and self._has(kind, dtype, head_dim, head_dim_v):
            return self._ahead  # type: ignore[return-value]
        if self._is_misfit:
            raise UnsupportedError(self._why)
        from magi_attention.native import jit

        try:
            library = FfaLibrary(jit.load_variant(_NAMES[dtype], head_dim, head_dim_v, self.family.name, kind=kind))
        except BuildError as error:
            raise BuildError(
                f"{self._lack(kind, dtype, head_dim, head_dim_v)} Backend 'ffa' was to compile it and could not; "
                f"remove the cause, or set MAGI_ATTENTION_KERNEL_BACKEND=sdpa_ol for another backend. {error}"
            ) from error
        self._compiled = library
        return library

    def _has(self, kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
        return self._ahead is not None and self._ahead.has(kind, DTYPES[dtype], head_dim, head_dim_v)

    def _lack(self, kind: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str:
        what = f"{_DIRECTIONS[kind]} kernel for {_NAMES[dtype]} and head dims {head_dim} and {head_dim_v}"
        if self._ahead is None:
            return f"There is no {what}: {self._why}"
        if self._has(kind, dtype, head_dim, head_dim_v):
            return f"MAGI_ATTENTION_FORCE_JIT_BUILD=1 passes over the {what} of the library built ahead."
        return f"The library built ahead holds no {what}; `python -m magi_attention.native.build` builds them all."
