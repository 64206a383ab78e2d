# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers, converted once: a tensor kept as it is would be compared by identity and stay at the value
that it had first."""

from __future__ import annotations

from typing import Any

from magi_attention.errors import ContractError


def as_float(value: Any, name: str, if_learnable: str = "") -> float:
    """``value`` as a float: a number, a NumPy scalar or a tensor of one element; NaN and inf included.

    ``ContractError`` for anything else and for a tensor that requires a gradient; ``if_learnable`` then says how one
    can be had.
    """
    if type(value) is float:
        return value
    _check_constant(value, name, if_learnable)
    if isinstance(value, (str, bytes)) or getattr(value, "numel", lambda: 1)() != 1:
        raise ContractError(f"{name} is {value!r}; give one number.")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ContractError(f"{name} is {value!r}; give a number.") from None


def as_number(value: Any, name: str) -> int | float | bool:
    """``value`` in the Python type that it has, so that large integers stay exact; errors as of ``as_float``."""
    if type(value) is int or type(value) is float or type(value) is bool:
        return value
    _check_constant(value, name)
    if getattr(value, "dtype", None) is not None and getattr(value, "ndim", 1) == 0:
        item: int | float | bool = value.item()
        return item
    return as_float(value, name)


def _check_constant(value: Any, name: str, if_learnable: str = "") -> None:
    if getattr(value, "requires_grad", False):
        raise ContractError(
            f"{name} is a tensor that requires a gradient, and there is none for it. Give a number, for example "
            f"{name}.item().{if_learnable and ' ' + if_learnable}"
        )
