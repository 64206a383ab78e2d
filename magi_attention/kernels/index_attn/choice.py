# SPDX-License-Identifier: Apache-2.0
"""Which implementation of index attention runs a problem."""

from __future__ import annotations

from functools import lru_cache

import torch

from magi_attention.common.enum import MagiAttentionKernelBackend as Asked
from magi_attention.env import general
from magi_attention.env.registry import watch
from magi_attention.errors import NoBackendError
from magi_attention.kernels.ffa.operands import remember
from magi_attention.kernels.index_attn.ffa import IndexFfa
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexBackend, IndexProblem, PreparedIndices
from magi_attention.kernels.types import AttnOptions

# What decides, besides the problem, which implementation runs it.
_WATCHED = (
    "MAGI_ATTENTION_KERNEL_BACKEND",
    "MAGI_ATTENTION_SDPA_BACKEND",
    "MAGI_ATTENTION_FA4_BACKEND",
    "MAGI_ATTENTION_PORTABLE_KERNELS",
)


class IndexBackends:
    """Implementations, best first, and for problems that came before the one that was chosen."""

    def __init__(self, backends: tuple[IndexBackend, ...]) -> None:
        self.backends = backends
        # The problem is held, so that its id, which is part of the key, stays taken.
        self._chosen: dict[tuple[object, ...], tuple[IndexBackend, IndexProblem]] = {}
        self._asked = watch(*_WATCHED)

    def choose(self, problem: IndexProblem) -> IndexBackend:
        """See ``choose`` below."""
        key = (id(problem), *self._asked())
        found = self._chosen.get(key)
        if found is None:
            found = self._search(problem), problem
            remember(self._chosen, key, found)
        return found[0]

    def _search(self, problem: IndexProblem) -> IndexBackend:
        asked = general.kernel_backend() if general.is_kernel_backend_explicit() else None
        name = "sdpa" if asked is Asked.SDPA_OL else None if asked is None else asked.value
        refusals = []
        for backend in self.backends:
            reason = f"'{name}' was asked for." if name not in (None, backend.name) else backend.why_not(problem)
            if reason is None:
                return backend
            refusals.append(f"  {backend.name}: {reason}")
        lines = "\n".join(refusals)
        asked_for = "" if name is None else f" Or unset MAGI_ATTENTION_KERNEL_BACKEND, which asks for '{name}'."
        raise NoBackendError(
            f"Nothing can run this index attention; change the inputs.{asked_for} What each implementation says:\n"
            f"{lines}"
        )


@lru_cache(maxsize=1)
def default_backends() -> IndexBackends:
    """Those of this build, which all callers share. The reference is the last and runs everything."""
    return IndexBackends((IndexFfa(), IndexReference()))


def backends() -> tuple[IndexBackend, ...]:
    """The implementations, best first."""
    return default_backends().backends


def has_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, options: AttnOptions, lists: PreparedIndices,
    sink: torch.Tensor | None, needs_backward: bool, head_dim_v: int | None = None,
) -> bool:  # fmt: skip
    """Does ``choose`` give a kernel for the call, rather than the reference or an error?"""
    problem = IndexProblem.of_lists(q, k, v, options, lists, sink, needs_backward, head_dim_v)
    try:
        return choose(problem).name != IndexReference().name
    except NoBackendError:
        return False


def choose(problem: IndexProblem) -> IndexBackend:
    """The first implementation that can run the problem; the one that the environment names, if it names one.

    Raises:
        NoBackendError: nobody can run it, or the one asked for cannot. ``sdpa`` and ``sdpa_ol`` are one here.
    """
    return default_backends().choose(problem)
