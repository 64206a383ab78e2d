# SPDX-License-Identifier: Apache-2.0
"""Lists, permutations, lengths, factors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from magi_attention.errors import ContractError

T = TypeVar("T")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def flatten_nested_list(nested_list: list | tuple) -> list:
    """``[1, [2, (3,)]]`` to ``[1, 2, 3]``; lists and tuples are opened, nothing else."""
    out, stack = [], [nested_list]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        else:
            out.append(item)
    return out


def perm_idxs2unperm_idxs(perm_idxs: list[int]) -> list[int]:
    """The inverse permutation: ``out[perm_idxs[i]] == i``."""
    out = [0] * len(perm_idxs)
    for i, target in enumerate(perm_idxs):
        out[target] = i
    return out


def wrap_to_list(x: Any, broadcast_to_length: int = 1) -> list[Any]:
    """A list or tuple as a list, anything else as a list; one element is repeated to the length."""
    out = list(x) if isinstance(x, (list, tuple)) else [x]
    return out * broadcast_to_length if len(out) == 1 else out


def _equal_ones(_list: list[Any], val: Any, just_same: bool) -> list[bool]:
    """For each element: is it the wanted one?"""
    if not _list:
        return []
    wanted = _first_or_given(_list[0], "val", val, just_same)
    return [bool(x == wanted) for x in _list]


def is_list_value_all(_list: list[Any], val: Any = None, just_same: bool = False, allow_empty: bool = False) -> bool:
    """Are all elements ``val`` (or, with ``just_same``, equal)? An empty list gives ``allow_empty``.

    ``ContractError`` if both ``val`` and ``just_same`` are given.
    """
    same = _equal_ones(_list, val, just_same)
    return all(same) if same else allow_empty


def is_list_value_any(_list: list[Any], val: Any = None, just_same: bool = False, allow_empty: bool = False) -> bool:
    """Is some element ``val`` (or, with ``just_same``, equal to the first)? Empty: ``allow_empty``.

    ``ContractError`` if both ``val`` and ``just_same`` are given.
    """
    same = _equal_ones(_list, val, just_same)
    return any(same) if same else allow_empty


def is_list_type_all(
    _list: list[Any], _type: type | tuple[type, ...] | None = None, just_same: bool = False, allow_empty: bool = False
) -> bool:
    """Are all elements of ``_type``, a type or several (or, with ``just_same``, of the first one's type)?

    An empty list gives ``allow_empty``. ``ContractError`` if both or neither of ``_type`` and ``just_same`` are given.
    """
    if not _list:
        return allow_empty
    wanted = _first_or_given(type(_list[0]), "_type", _type, just_same)
    if wanted is None:
        raise ContractError("is_list_type_all needs a _type, or just_same=True for the type of the first element.")
    return all(isinstance(x, wanted) for x in _list)


def _first_or_given(first: Any, name: str, given: Any, just_same: bool) -> Any:
    if just_same and given is not None:
        raise ContractError(f"just_same=True compares with the first element; leave {name}={given!r} out.")
    return first if just_same else given


def transpose_matrix(matrix: list[list[T]]) -> list[list[T]]:
    """Rows to columns; ``ContractError`` if the rows differ in length."""
    if len({len(row) for row in matrix}) > 1:
        raise ContractError("The rows of the matrix differ in length; pad them first.")
    return [list(column) for column in zip(*matrix)]


def argmin(iterable: Iterable[T], key: Callable[[T], Any] = lambda x: x) -> int:
    """Index of the first least element."""
    return min(enumerate(iterable), key=lambda pair: key(pair[1]))[0]


def argmax(iterable: Iterable[T], key: Callable[[T], Any] = lambda x: x) -> int:
    """Index of the first largest element."""
    return max(enumerate(iterable), key=lambda pair: key(pair[1]))[0]


def argsort(iterable: Iterable[T], key: Callable[[T], Any] = lambda x: x) -> list[int]:
    """Indices that sort the elements, stable."""
    return [i for i, _ in sorted(enumerate(iterable), key=lambda pair: key(pair[1]))]


def seqlens2cu_seqlens(seqlens: Sequence[int]) -> list[int]:
    """``[3, 4]`` to ``[0, 3, 7]``."""
    return list(accumulate(seqlens, initial=0))


def cu_seqlens2seqlens(cu_seqlens: Sequence[int]) -> list[int]:
    """``[0, 3, 7]`` to ``[3, 4]``."""
    return [b - a for a, b in pairwise(cu_seqlens)]


def get_factors(n: int) -> list[int]:
    """Divisors of ``n >= 1``, ascending."""
    if n < 1:
        raise ContractError(f"{n} has no list of factors; give an integer of at least 1.")
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def find_factors_in_range(factors: Sequence[int], min_factor: int, max_factor: int, multiple_of: int = 1) -> list[int]:
    """Those in ``[min_factor, max_factor]`` that ``multiple_of`` divides, in the given order."""
    return [f for f in factors if min_factor <= f <= max_factor and f % multiple_of == 0]


def str2seed(s: str) -> int:
    """A 32-bit seed that is the same in every process, unlike ``hash``."""
    return int.from_bytes(hashlib.blake2b(s.encode(), digest_size=4).digest(), "big")


def missing_dependency(name: str, package: str | None = None) -> Callable[..., Any]:
    """A stand-in for ``name`` whose call raises ``ImportError`` with the package to install."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(f"{name} is not available; run `pip install {package or name}`.")

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in
