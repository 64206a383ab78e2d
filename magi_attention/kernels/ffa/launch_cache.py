# SPDX-License-Identifier: Apache-2.0
"""The launch cache of a public function: calls that ran before are launched again by native code.

``KnownCalls.find`` takes the arguments of the function and gives its result, or None. Then the function takes its usual
path, with all its checks, and afterwards calls ``remember``, which keeps what a launch needs. The cache itself is the
native module ``_magi_host`` (``csrc/python``); without it nothing is cached, and one log line says why.

A call is known if nothing that the usual path looks at has changed: plain tensors (no subclass) of the same shapes,
strides, dtypes and device, no gradient wanted, the same options, the very same mask tensors unedited, the same stream,
no CUDA graph being captured, no mode or transform of torch active (``torch.set_default_device`` is one), the same
environment. Entries go when a tensor of their mask does.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from magi_attention.env import registry
from magi_attention.errors import UnsupportedError
from magi_attention.kernels.eager import watching_modes
from magi_attention.native.loader import load_host

_log = logging.getLogger("magi_attention.kernels")


class PreparedCall(NamedTuple):
    """What native code needs to launch a call again; ``runtime`` is as ``kernels.ffa.CudaRuntime``."""

    prefix: bytes  # of magi_ffa_fwd_params, up to the addresses
    launch_address: int  # of magi_ffa_fwd
    check: Callable[[int, str], None]  # raises what a status means
    runtime: Any
    device_index: int
    stream: int
    out_like: torch.Tensor
    lse_like: torch.Tensor
    make_max_logits: Callable[[], torch.Tensor] | None
    plan: torch.Tensor
    plan_address: int
    workspace: torch.Tensor
    workspace_address: int


class TorchHooks(NamedTuple):
    """What native code asks torch, since it is built without torch's headers."""

    exchange_api: Any  # capsule of DLPack's function table
    tensor: type
    parameter: type
    empty_like: Callable[..., torch.Tensor]
    is_grad_enabled: Callable[[], bool]
    answers: tuple[tuple[Callable[[], object], object], ...]  # (function, the small constant that it must return)
    entries: tuple[tuple[dict[str, Any], str, object], ...]  # (dictionary, key, what it must hold)

    @classmethod
    def find(cls) -> TorchHooks:
        """The hooks of the installed torch; ``UnsupportedError`` if it has other names for them."""
        api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if api is None:
            raise UnsupportedError(
                f"torch {torch.__version__} does not show its tensors to C code; install torch 2.10 or newer."
            )
        if not hasattr(forward_ad, "_current_level"):
            raise UnsupportedError(f"torch {torch.__version__} keeps tangents in a way unknown to this package.")
        return cls(
            api, torch.Tensor, torch.nn.Parameter, torch.empty_like, torch.is_grad_enabled,
            answers=watching_modes(),
            # Tangents of forward-mode differentiation are invisible to all of the above.
            entries=((vars(forward_ad), "_current_level", -1),),
        )  # fmt: skip


def _nothing(*_: Any, **__: Any) -> None:
    return None


class KnownCalls:
    """The memo of one public function, whose parameters are ``signature``.

    ``result`` is a class without constructor logic, of which one is made per call, with attributes ``lse`` and
    ``max_logits``. ``prepare`` gets all arguments by name and gives a ``PreparedCall``, or None. ``is_wanted`` says
    whether there is a kernel backend at all; native code is loaded at the first call of ``remember`` if so.
    ``watched`` are the environment variables that ``prepare`` depends on, ``ignored`` parameters that never change a
    launch.
    """

    def __init__(
        self, signature: inspect.Signature, result: type, prepare: Callable[..., PreparedCall | None],
        is_wanted: Callable[[], bool], watched: tuple[str, ...], ignored: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._arguments = (signature, result, prepare, watched, ignored)
        self._is_wanted = is_wanted
        self._memo: Any = None
        self.forget()

    def forget(self) -> None:
        """Back to the state before the first call."""
        if self._memo is not None:
            self._memo.forget_all()
        self._memo = None
        # Attributes and no methods, because a method in between would cost as much as the search.
        self.find: Callable[..., Any] = _nothing
        self.remember: Callable[..., None] = self._first

    def __len__(self) -> int:
        return 0 if self._memo is None else len(self._memo)

    def _first(self, *args: Any, **kwargs: Any) -> None:
        self.remember = _nothing
        if not self._is_wanted():
            return
        try:
            self._memo = self._load()
        except UnsupportedError as reason:
            _log.info("Repeated attention calls cost the host several times what they could: %s", reason)
            return
        self.find, self.remember = self._memo.find, self._memo.remember
        self.remember(*args, **kwargs)

    def _load(self) -> Any:
        signature, result, prepare, watched, ignored = self._arguments
        parameters = signature.parameters.values()
        environment, keys = registry.raw_entries(watched)
        try:
            return load_host().KnownCalls(
                hooks=TorchHooks.find(),
                signature=[(p.name, p.default) for p in parameters],
                positional=sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters),
                ignored=ignored, environment=environment, watched=keys, result=result, prepare=prepare,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise UnsupportedError(f"_magi_host does not understand this torch or Python: {error}") from None


__all__ = ["KnownCalls", "PreparedCall", "TorchHooks"]
