# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernel backend: an ordered, immutable list, asked one by one.

Every backend says itself whether it can run a problem (``Backend.why_not``). A backend from elsewhere
joins by ``default_registry().with_backend(mine, before="sdpa_ol")``, which gives a new registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from magi_attention.errors import ContractError, NoBackendError
from magi_attention.kernels.cudnn_flex.backend import CudnnFlexBackend
from magi_attention.kernels.fa4.backend import Fa4Backend
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.instruments import Instruments
from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.reference.sdpa_online import SdpaOnlineBackend
from magi_attention.kernels.tables import SliceTables
from magi_attention.kernels.types import Backend, Problem
from magi_attention.kernels.wheel_backend import WheelBackend

_log = logging.getLogger("magi_attention.kernels")


@dataclass(frozen=True)
class Registry:
    """Backends in order of preference.

    ``tables`` are those of masks that come as values, for whichever backend runs. ``instruments`` measure calls.
    ``prepared`` is the memo of ``kernels.ffa.custom_ops``: what was chosen from this list. A new registry has its own.
    """

    backends: tuple[Backend, ...]
    tables: SliceTables = field(default_factory=SliceTables, repr=False, compare=False)
    instruments: Instruments = field(default_factory=Instruments, repr=False, compare=False)
    prepared: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that ``select`` knows, whether they can run here or not."""
        return tuple(b.name for b in self.backends)

    def with_backend(self, backend: Backend, before: str | None = None) -> Registry:
        """A new registry that also holds ``backend``: ahead of ``before``, by default ahead of all.

        A backend of the same name is replaced.
        """
        others = tuple(b for b in self.backends if b.name != backend.name)
        place = 0
        if before is not None:
            found = [i for i, b in enumerate(others) if b.name == before]
            if not found:
                raise ContractError(f"No backend is called {before!r}; the names are {', '.join(self.names)}.")
            place = found[0]
        return replace(self, backends=others[:place] + (backend,) + others[place:])

    def select(self, problem: Problem, prefer: str | None = None, explicit: bool = False) -> tuple[Backend, str]:
        """The backend to run ``problem`` with, and a sentence that says why this one.

        ``prefer`` is a name or None. "ffa", which is the default, gives way to a backend that is ahead of it on the
        GPU (``preference``), unless the user asked for it. If the preferred backend cannot run: ``NoBackendError``
        when the user asked for it by name (``explicit``), else the first backend in order that can, and one log line
        per reason on logger ``magi_attention.kernels``. On the CPU, where "ffa" never runs, only rank 0 says so.
        """
        if prefer is not None and prefer not in self.names:
            raise ContractError(f"Unknown kernel backend {prefer!r}; use one of {', '.join(self.names)}.")
        # Only those in question are asked, because a backend may load a wheel to answer.
        ahead = [] if explicit or prefer != "ffa" else [b for b in self.backends if _preference(b, problem) > 0]
        for backend in sorted(ahead, key=lambda b: -_preference(b, problem)):
            if backend.why_not(problem) is None:
                return backend, f"Backend '{backend.name}' is preferred to '{prefer}' on {problem.capability}."
        if prefer is not None and self._named(prefer).why_not(problem) is None:
            return self._named(prefer), f"Backend '{prefer}' was asked for and can run."
        refusals = {name: reason for name, reason in self.answers(problem).items() if reason is not None}
        usable = [b for b in self.backends if b.name not in refusals]
        usable.sort(key=lambda b: -_preference(b, problem))  # stable: else in order
        if not usable or (explicit and prefer is not None):
            lines = "\n".join(f"  {name}: {refusals.get(name, 'can run')}" for name in self.names)
            who = f"Kernel backend '{prefer}' cannot run" if explicit else "No kernel backend can run"
            raise NoBackendError(
                f"{who} this problem ({_describe(problem)}). Choose another backend or change the "
                f"inputs; what each backend says:\n{lines}"
            )
        if prefer is None:
            return usable[0], f"Backend '{usable[0].name}' is the first that can run."
        reason = f"Backend '{usable[0].name}' runs in place of '{prefer}': {refusals[prefer]}"
        if problem.device_type == "cpu" and prefer == "ffa":
            # Nothing is amiss there, so all ranks together say it once.
            if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
                _warn_once(f"Attention runs on the CPU, by PyTorch's kernels ('{usable[0].name}').")
        else:
            _warn_once(reason)
        return usable[0], reason

    def taking_delta(self, backend: Backend, problem: Callable[[], Problem]) -> Backend:
        """``backend``, or, where the kernels of a wheel want to work delta out themselves, the first other that can run
        the problem, which one log line says."""
        if not isinstance(backend, WheelBackend):
            return backend
        others = [b for b in self.backends if not isinstance(b, WheelBackend)]
        taken, _ = replace(self, backends=tuple(others)).select(problem())
        _warn_once(f"Backend '{backend.name}' takes no gradient of lse; '{taken.name}' runs such a backward.")
        return taken

    def answers(self, problem: Problem) -> dict[str, str | None]:
        """What each backend says to a problem, in order: None if it can run it, else a sentence why not."""
        return {backend.name: backend.why_not(problem) for backend in self.backends}

    def _named(self, name: str) -> Backend:
        return next(b for b in self.backends if b.name == name)


def _preference(backend: Backend, problem: Problem) -> int:
    """How far ahead of others a backend says it is for a problem; 0 of those that say nothing."""
    preference = getattr(backend, "preference", None)
    return 0 if preference is None else preference(problem)


def _describe(problem: Problem) -> str:
    return (
        f"{problem.device_type}, {problem.dtype}, {problem.num_heads_q} query and {problem.num_heads_kv} kv "
        f"heads, head dims {problem.head_dim} and {problem.head_dim_v}"
    )


@lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    # The memo is what makes it once per process and reason; it holds no result.
    _log.warning(reason)


@lru_cache(maxsize=1)
def default_registry() -> Registry:
    """The backends of this build. Immutable, so that all callers share one.

    "ffa" is in the list whether a library is built ahead or not, because its kernels may be compiled at first use. No
    library is loaded and no GPU touched before a problem asks for it.
    """
    return Registry((FfaBackend(), CudnnFlexBackend(), Fa4Backend(), SdpaOnlineBackend(), SdpaBackend()))
