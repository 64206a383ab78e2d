# SPDX-License-Identifier: Apache-2.0
"""Which implementation of index attention runs a problem."""

from __future__ import annotations

import torch

from magi_attention.common.enum import MagiAttentionKernelBackend as Asked
from magi_attention.env import general
from magi_attention.errors import NoBackendError
from magi_attention.kernels.index_attn.ffa import IndexFfa
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexBackend, IndexProblem, PreparedIndices
from magi_attention.kernels.types import AttnOptions


def backends() -> tuple[IndexBackend, ...]:
    """The implementations, best first. The reference is the last and runs everything."""
    return (IndexFfa(), IndexReference())


def has_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttnOptions, lists: PreparedIndices,
    sink: torch.Tensor | None, needs_backward: bool,
) -> bool:  # fmt: skip
    """Does ``choose`` give a kernel for the call, rather than the reference or an error?"""
    problem = IndexProblem.of_lists(q, k, v, options, lists, sink, needs_backward)
    try:
        return choose(problem).name != IndexReference().name
    except NoBackendError:
        return False


def choose(problem: IndexProblem) -> IndexBackend:
    """The first implementation that can run the problem; the one that the environment names, if it names one.

    Raises:
        NoBackendError: nobody can run it, or the one asked for cannot. ``sdpa`` and ``sdpa_ol`` are one here.
    """
    asked = general.kernel_backend() if general.is_kernel_backend_explicit() else None
    name = "sdpa" if asked is Asked.SDPA_OL else None if asked is None else asked.value
    refusals = []
    for backend in backends():
        reason = f"'{name}' was asked for." if name not in (None, backend.name) else backend.why_not(problem)
        if reason is None:
            return backend
        refusals.append(f"  {backend.name}: {reason}")
    lines = "\n".join(refusals)
    asked_for = "" if name is None else f" Or unset MAGI_ATTENTION_KERNEL_BACKEND, which asks for '{name}'."
    raise NoBackendError(
        f"Nothing can run this index attention; change the inputs.{asked_for} What each implementation says:\n{lines}"
    )
