# SPDX-License-Identifier: Apache-2.0
"""Calls at which ``torch.compile`` breaks the graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def breaks_graph(reason: str) -> Callable[[_Function], _Function]:
    """``torch.compiler.disable``, which imports the compiler, put off until a program has done so."""

    def decorate(func: _Function) -> _Function:
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return func(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(func, reason=reason))
            return disabled[0](*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
