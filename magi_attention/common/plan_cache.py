# SPDX-License-Identifier: Apache-2.0
"""``PlanCache``: the tables that were made from one mask or one plan, and how many bytes they take.

A mask, a plan and what runs a plan have one each, as their attribute ``cache``. A table has a kind and a key::

    BLOCKS: Kind[tuple[int, int], NDArray[np.int64]] = Kind("blocks of each tile")
    blocks = slices.cache.get(BLOCKS, (total_q, total_k), lambda: count_blocks(slices, total_q, total_k))
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kind(Generic[K, V]):
    """One kind of table, told apart by identity. ``name`` is for people.

    ``arrays`` gives the arrays and tensors of a table; by default the table is one, or holds them in tuples, lists and
    dictionaries.
    """

    __slots__ = ("arrays", "name")

    def __init__(self, name: str, arrays: Callable[[V], Iterable[object]] | None = None) -> None:
        self.name, self.arrays = name, arrays

    def __repr__(self) -> str:
        return f"Kind({self.name!r})"


class Bytes(NamedTuple):
    """Sizes of arrays and tensors, on the host and on GPUs."""

    host: int = 0
    device: int = 0


class PlanCache:
    """Tables by kind and key. Their bytes are counted when they come in, so a table must not grow afterwards.

    A cache lives as long as its owner. ``include`` counts the cache of a part in, which lives as long as the part.
    Threads may share a cache: all of them get the table that came in first. A copy is empty, and so is what a pickle
    gives.
    """

    __slots__ = ("__weakref__", "_counted", "_lock", "_parts", "_sizes", "_tables")

    def __init__(self) -> None:
        self._tables: dict[tuple[Kind[Any, Any], Hashable], Any] = {}
        self._sizes: dict[tuple[Kind[Any, Any], Hashable], Bytes] = {}  # of tables that hold an array
        self._counted: dict[str, Bytes] = {}
        self._parts: weakref.WeakSet[PlanCache] | None = None
        self._lock = threading.Lock()

    def find(self, kind: Kind[K, V], key: K) -> V | None:
        """The table, or None. A kind whose tables may be None wants ``get``."""
        found: V | None = self._tables.get((kind, key))
        return found

    def get(self, kind: Kind[K, V], key: K, make: Callable[[], V]) -> V:
        """The table, made and kept if there is none. ``make`` may use the cache itself."""
        found: V = self._tables.get((kind, key), _MISSING)
        return self._add((kind, key), make()) if found is _MISSING else found

    def put(self, kind: Kind[K, V], key: K, table: V) -> None:
        """Keeps a table that came from elsewhere, unless there is one."""
        self._add((kind, key), table)

    def pop(self, kind: Kind[K, V], key: K) -> V | None:
        """The table, which the caller takes out, or None."""
        with self._lock:
            self._sizes.pop((kind, key), None)
            found: V | None = self._tables.pop((kind, key), None)
        return found

    def items(self, kind: Kind[K, V]) -> list[tuple[K, V]]:
        """Key and table of all tables of a kind."""
        with self._lock:
            found: list[Any] = [(key, table) for (other, key), table in self._tables.items() if other is kind]
        return found

    def values(self, kind: Kind[K, V]) -> list[V]:
        """All tables of a kind."""
        return [table for _, table in self.items(kind)]

    def __len__(self) -> int:
        """Tables, without those of parts."""
        return len(self._tables)

    def count(self, name: str, *arrays: object) -> None:
        """Counts arrays and tensors that the owner itself holds as long as it lives, in place of those of the name."""
        size = _size_of(arrays)
        with self._lock:
            self._counted[name] = size

    def include(self, *parts: PlanCache) -> None:
        """From now on these caches are counted and cleared together with this one."""
        with self._lock:
            if self._parts is None:
                self._parts = weakref.WeakSet()
            self._parts.update(parts)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host of all tables and counted arrays, those of parts included; each cache is counted once."""
        return sum(size.host for size in self._all_sizes())

    @property
    def device_bytes(self) -> int:
        """The same on GPUs."""
        return sum(size.device for size in self._all_sizes())

    @property
    def nbytes(self) -> int:
        """``host_bytes`` and ``device_bytes`` together."""
        return sum(map(sum, self._all_sizes()))

    def clear(self) -> None:
        """Drops all tables, those of parts included. Counted arrays stay, for their owners hold them. Whoever runs a
        call holds what it needs; the next call makes its tables anew."""
        for cache in self._members():
            with cache._lock:
                dropped, cache._tables, cache._sizes = cache._tables, {}, {}
            del dropped  # outside the lock: a table may run code when it goes

    def __reduce__(self) -> tuple[type[PlanCache], tuple[()]]:
        return PlanCache, ()

    def _add(self, at: tuple[Kind[Any, Any], Hashable], table: Any) -> Any:
        arrays = at[0].arrays
        size = _size_of(table if arrays is None else tuple(arrays(table)))
        with self._lock:
            if at in self._tables:  # another thread was first
                return self._tables[at]
            self._tables[at] = table
            if any(size):
                self._sizes[at] = size
        return table

    def _all_sizes(self) -> Iterator[Bytes]:
        for cache in self._members():
            with cache._lock:
                sizes = [*cache._sizes.values(), *cache._counted.values()]
            yield from sizes

    def _members(self) -> list[PlanCache]:
        """This cache, its parts, their parts; each once."""
        found, todo = {id(self): self}, [self]
        while todo:
            cache = todo.pop()
            with cache._lock:
                parts = [] if cache._parts is None else list(cache._parts)
            todo += [part for part in parts if id(part) not in found]
            found.update((id(part), part) for part in parts)
        return list(found.values())


_MISSING: Any = object()


def _size_of(value: object) -> Bytes:
    """Bytes of all arrays and tensors in a value, each counted once."""
    host = device = 0
    for x in {id(x): x for x in _arrays(value)}.values():
        if is_on_host(x):
            host += int(x.nbytes)
        else:
            device += int(x.nbytes)
    return Bytes(host, device)


def _arrays(value: object) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _arrays(part)
    elif hasattr(value, "dtype") and hasattr(value, "nbytes"):
        yield value


def is_on_host(array: object) -> bool:
    """Whether an array or a tensor is in the memory of the host."""
    # The device of an array of NumPy is a string, that of a tensor has a type.
    return getattr(getattr(array, "device", None), "type", "cpu") == "cpu"


def on_gpu(table: object) -> list[object]:
    """``arrays`` of a kind whose tensors share the memory of counted arrays on the host, and are copies on a GPU."""
    return [x for x in _arrays(table) if not is_on_host(x)]
