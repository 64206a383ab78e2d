# SPDX-License-Identifier: Apache-2.0
"""``parameterize``: many cases inside one test method, so that one process group serves all of them."""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable, Iterable
from typing import Any

from magi_attention.compat.utils.sequences import str2seed
from magi_attention.env import registry


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Calls the function once per value of the keyword ``argument``; decorators stack to all combinations.

    A failure is raised again, with the same type where possible, with the arguments in its message. A case
    that raises ``unittest.SkipTest`` is left out; if all are, the whole is skipped. With
    ``MAGI_ATTENTION_PARAMETERIZE_RUN_IN_MP=1`` a process runs only the cases that hash to its rank.
    """
    values = list(values)

    def decorate(func: Callable) -> Callable:
        is_innermost = not getattr(func, "_is_parameterized", False)

        @functools.wraps(func)
        def wrapped(*args, **kwargs) -> None:
            skipped = 0
            for value in values:
                case = {**kwargs, argument: value}
                if is_innermost and not _is_mine(case, args):
                    continue
                try:
                    func(*args, **case)
                except unittest.SkipTest as skip:
                    skipped += 1
                    reason = skip
                except Exception as error:
                    raise _with_case(error, argument, value) from error
            if values and skipped == len(values):
                raise reason

        wrapped._is_parameterized = True  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _with_case(error: Exception, argument: str, value: Any) -> Exception:
    message = f"{error}\n  with {argument} = {value!r}"
    try:
        return type(error)(message)
    except TypeError:  # exceptions whose constructors take something else
        return RuntimeError(f"{type(error).__name__}: {message}")


def _is_mine(case: dict[str, Any], args: tuple) -> bool:
    if not registry.get("MAGI_ATTENTION_PARAMETERIZE_RUN_IN_MP"):
        return True
    owner = args[0] if args else None
    world_size = int(getattr(owner, "world_size", os.environ.get("WORLD_SIZE", 1)))
    rank = int(getattr(owner, "rank", os.environ.get("RANK", 0)))
    text = ", ".join(f"{name}={case[name]!r}" for name in sorted(case))
    return str2seed(text) % world_size == rank
