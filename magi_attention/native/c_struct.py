# SPDX-License-Identifier: Apache-2.0
"""Fields of a C struct from text like that of the header: one type, then the names that have it."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_TYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
    "void*": ctypes.c_void_p,
}


def fields(text: str, **structs: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """``_fields_`` of a struct, in the order of ``text``.

    A line is a type and the names of its fields, as ``"int32 version rank"``; ``"int64[3] data_at"`` is an array. Types
    are those of ``_TYPES`` and the nested ``structs`` by their keyword. ``KeyError`` names a type that is none of them.
    """
    found: list[tuple[str, Any]] = []
    for kind, *names in filter(None, map(str.split, text.splitlines())):
        base, _, length = kind.rstrip("]").partition("[")
        one = structs[base] if base in structs else _TYPES[base]
        found += [(name, one * int(length) if length else one) for name in names]
    return found


def strides(names: str) -> str:
    """The names of the strides of a token and of a head, for each of these tensors."""
    return " ".join(f"{name}_stride_{dim}" for name in names.split() for dim in ("token", "head"))


def divided(kind: type[ctypes.Structure], first: str) -> tuple[int, struct.Struct]:
    """Where the parameters of a launch divide: ``(bytes of the prefix, format of the tail)``.

    A caller prepares the prefix once, up to the field ``first``. Each call packs the addresses and int64 behind it:
    0.5 us, where filling the struct takes 3. ``ValueError`` if a field of the tail is of another size.
    """
    begin: int = getattr(kind, first).offset
    tail = [part for name, part, *_ in kind._fields_ if getattr(kind, name).offset >= begin]
    values = struct.Struct(f"={(ctypes.sizeof(kind) - begin) // 8}Q")
    if any(ctypes.sizeof(part) % 8 for part in tail) or begin + values.size != ctypes.sizeof(kind):
        raise ValueError(f"{kind.__name__} has fields behind {first} that are not of 8 bytes; put them before it.")
    return begin, values
