# SPDX-License-Identifier: Apache-2.0
"""TOML tables as frozen dataclasses: unknown keys and wrong types are sentences."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.textfile import read_text

T = TypeVar("T")
_WORDS = {str: "a text in quotes", int: "a whole number", bool: "true or false"}


def read_toml(path: Path) -> dict:
    """The tables of a file; ``LaunchError`` if it cannot be read."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_text(path, "The spec", LaunchError))
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"{path} is no TOML: {error}.") from None


def build(kind: type[T], table: Mapping, where: str) -> T:
    """A ``kind`` from a table with the same keys; what is missing keeps its default.

    Raises:
        LaunchError: unknown key, with the nearest one, or wrong type, with the right one.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(hints)}."
            raise LaunchError(f"{where}: {key!r} is unknown; {hint}")
        values[key] = _value(hints[key], value, f"{where}: {key}")
    return kind(**values)


def _value(hint: object, value: object, where: str) -> object:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise LaunchError(f"{where} is {value!r}; write it as a table of its own.")
        return build(hint, value, where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):  # the only unions here are `X | None`
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
        return None if value is None else _value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise LaunchError(f"{where} is {value!r}; give a list of texts.")
        return tuple(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise LaunchError(f"{where} is {value!r}; give a table of texts, numbers in quotes.")
        return dict(value)
    for kind, words in _WORDS.items():
        if hint is kind and type(value) is not kind:
            raise LaunchError(f"{where} is {value!r}; give {words}.")
    return value
