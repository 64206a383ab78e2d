# SPDX-License-Identifier: Apache-2.0
"""``ListLike``: what ``AttnRanges`` and ``AttnRectangles`` have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, overload

from magi_attention.errors import ContractError

T = TypeVar("T")
L = TypeVar("L", bound="ListLike[Any]")


class ListLike(Generic[T]):
    """Items in order, equal and hashed by value; ``_item`` makes one of what is assigned."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[T] = []

    @classmethod
    def _of(cls: type[L], items: Iterable[Any]) -> L:
        out = cls()
        out._items = list(items)
        return out

    @staticmethod
    def _item(value: Any) -> T:
        """Each list has its own."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self._items)

    def is_empty(self) -> bool:
        """Are there no items (not: only empty ones)?"""
        return not self._items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, idx: int) -> T: ...

    @overload
    def __getitem__(self: L, idx: slice) -> L: ...

    def __getitem__(self, idx: int | slice) -> Any:
        return self._of(self._items[idx]) if isinstance(idx, slice) else self._items[idx]

    def __setitem__(self, idx: int | slice, value: Any) -> None:
        """``x[a:b]`` takes ``b - a`` items even if ``x`` ends before ``b``, which makes it grow; ``x[a:]`` takes any
        number. ``ContractError`` for another number."""
        if not isinstance(idx, slice):
            self._items[idx] = self._item(value)
            return
        items = [self._item(x) for x in value]
        if idx.stop is not None:
            start, stop = (max(0, len(self) + x) if x < 0 else x for x in (idx.start or 0, idx.stop))
            if (wanted := len(range(start, stop, idx.step or 1))) != len(items):
                raise ContractError(
                    f"[{start}:{stop}] names {wanted} items and is assigned {len(items)}; give as many as it names."
                )
        self._items[idx] = items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._items == other._items

    def __hash__(self) -> int:
        return hash(tuple(self._items))
