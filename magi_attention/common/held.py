# SPDX-License-Identifier: Apache-2.0
"""How much memory tables take that objects of ours made and keep: arrays of the host and tensors of any device."""

from __future__ import annotations

from typing import Any

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def held_bytes(root: object, modules: tuple[str, ...]) -> int:
    """Bytes of all arrays and tensors that can be reached from ``root`` through dictionaries, lists, tuples and
    attributes of objects whose class is in one of ``modules`` (or below). Each is counted once, whole, if it is a view.
    """
    seen: set[int] = set()
    total = 0
    todo: list[Any] = [root]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            todo += [y for y in x.values() if type(y) not in _PLAIN]
        elif isinstance(x, (list, tuple)):
            todo += [y for y in x if type(y) not in _PLAIN]
        elif type(x).__module__.startswith(modules):
            todo += _attributes(x)
        elif type(getattr(x, "nbytes", None)) is int:
            total += x.nbytes
    return total


def _attributes(x: Any) -> list[Any]:
    names = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    slots = [getattr(x, name) for name in names if hasattr(x, name)]
    return [*vars(x).values(), *slots] if hasattr(x, "__dict__") else slots
