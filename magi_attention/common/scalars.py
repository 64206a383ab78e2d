# SPDX-License-Identifier: Apache-2.0
"""Arguments that are numbers, converted once: what would be cut or misread is refused by a sentence.

Token counts and positions become integers. Options become Python numbers: a tensor kept as it is would be compared by
identity and stay at the value that it had first.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.errors import ContractError


def as_int(value: Any, name: str, at_least: int | None = None) -> int:
    """``value`` as an int: an int, a NumPy integer or an integer tensor of one element.

    ``ContractError`` for anything else: floats (whole ones too), bools, strings, None.
    """
    number = value if type(value) is int else _index(value)
    if number is None or (at_least is not None and number < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise ContractError(f"{name} is {_shown(value) if number is None else number}; give an integer{bound}.")
    return number


def _index(value: Any) -> int | None:
    try:
        return None if _is_bool(value) else operator.index(value)
    except TypeError:  # a float, a tensor of floats or of several elements
        return None


def as_int_array(value: Any, name: str) -> NDArray[np.int64]:
    """``value`` (nested sequences, array or tensor on any device) as an int64 array of its shape.

    What has no element counts as integers. ``ContractError`` for elements that are not integers (floats, bools),
    or that do not fit, and for rows of unequal length.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
        if array.dtype == object and any(abs(x) >= 2**63 for x in array.flat if type(x) is int):
            raise OverflowError  # which NumPy itself raises for other types
    except (ValueError, TypeError) as error:
        raise ContractError(f"{name} is no array of integers ({error}); give integers, rows of one length.") from None
    except OverflowError:
        raise ContractError(f"{name} has a value beyond 64 bits; give integers below 2**63.") from None
    if not array.size:
        return array.astype(np.int64)
    has_bools = isinstance(value, (list, tuple)) and any(type(x) is bool for x in value)
    if not np.issubdtype(array.dtype, np.integer) or has_bools:
        found = f"holds {_kind(array, has_bools)}" if array.ndim else f"is {_shown(value)}"
        raise ContractError(f"{name} {found}; give integers.")
    if array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
        raise ContractError(f"{name} has the value {int(array.max())}; give integers below 2**63.")
    return array.astype(np.int64, copy=False)


def as_bools(value: Any, name: str) -> NDArray[np.bool_]:
    """``value`` (nested sequences, array or tensor on any device) as a boolean array of its shape.

    Booleans and the integers 0 and 1 are taken; what has no element is, too. ``ContractError`` for other integers and
    for floats: a mask that is added to logits has 0 where a pair is allowed, so its truth values say the opposite.
    """
    to_bools = "astype(bool)"
    if hasattr(value, "detach"):
        value, to_bools = value.detach().cpu(), "bool()"
        value = (value.float() if value.is_floating_point() else value).numpy()  # NumPy has no bfloat16
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ContractError(f"{name} is no array ({error}); give rows of one length.") from None
    if array.dtype == np.bool_ or not array.size:
        return array.astype(bool)
    if np.issubdtype(array.dtype, np.integer):
        other = array[(array != 0) & (array != 1)]
        if other.size:
            raise ContractError(f"{name} holds the integer {int(other[0])}; give booleans, or 0 and 1.")
        return array.astype(bool)
    raise ContractError(
        f"{name} holds values of dtype {array.dtype}; give booleans: of a mask that is added to logits (0 and -inf), "
        f"allowed pairs are `mask == 0`; of zeros and ones, `mask.{to_bools}`."
    )


def as_pairs(ranges: Any, name: str) -> NDArray[np.int64]:
    """``(n, 2)`` int64 from an array, a tensor or any iterable of pairs; ``ContractError`` for anything else."""
    is_array = hasattr(ranges, "dtype")
    array = as_int_array(ranges if is_array else [tuple(pair) for pair in ranges], name)
    if array.size and (array.ndim != 2 or array.shape[1] != 2):
        raise ContractError(f"{name} has shape {array.shape}; give pairs [start, end].")
    return array.reshape(-1, 2)


def as_window(value: Any, name: str = "window") -> tuple[int, int]:
    """``(left, right)``, each -1 (unlimited) or a number of keys; ``ContractError`` for anything else."""
    sides = tuple(value) if _has_two(value) else None
    if sides is None:
        raise ContractError(
            f"{name} is {_shown(value)}; give a pair (left, right) of integers, -1 for an unlimited side: "
            "(w, 0) is a causal window of w keys before the query."
        )
    left, right = (as_int(side, f"The {where} side of {name} {sides}") for side, where in zip(sides, ("left", "right")))
    if left < -1 or right < -1:
        raise ContractError(f"{name} ({left}, {right}) has a side below -1; use -1 for unlimited.")
    return left, right


def _has_two(value: Any) -> bool:
    try:
        return not isinstance(value, (str, bytes)) and len(value) == 2
    except TypeError:
        return False


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")) == "torch.bool"


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def _kind(array: NDArray[np.generic], has_bools: bool) -> str:
    if has_bools or array.dtype == np.bool_:
        return "bools"
    if np.issubdtype(array.dtype, np.floating):
        cut = array.reshape(-1)[array.reshape(-1) != np.floor(array.reshape(-1))]
        return f"floats, such as {float(cut[0] if len(cut) else array.reshape(-1)[0])}"
    return f"values of dtype {array.dtype}"


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
