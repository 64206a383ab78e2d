# SPDX-License-Identifier: Apache-2.0
"""Checks of config fields; each raises ``ContractError`` that names field, value and remedy."""

from __future__ import annotations

from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError


def set_ints(config: object, *names: str, at_least: int) -> None:
    """Makes these fields of a frozen config plain ints: what a plan's fingerprint is made of has one form."""
    for name in names:
        value = as_int(getattr(config, name), f"{type(config).__name__}.{name}", at_least)
        object.__setattr__(config, name, value)


def is_instance(value: object, kind: type) -> bool:
    """Is ``value`` of this class, also where another copy of the class's module made it (before or after a reload)?"""
    name = kind.__module__, kind.__qualname__
    return any((base.__module__, base.__qualname__) == name for base in type(value).__mro__)


def check_fraction(owner: str, name: str, value: object) -> None:
    if not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ContractError(f"{owner}.{name} is {value!r}; give a number from 0 to 1.")


class Algorithm:
    """An algorithm by its value: a frozen subclass says its ``_type``, which the base classes do not have."""

    _type: ClassVar[Any]
    _is_optimal: ClassVar[bool] = False
    _example: ClassVar[str]  # of a subclass, for the error

    def __post_init__(self) -> None:
        if not hasattr(self, "_type"):
            raise ContractError(f"{type(self).__name__} is only a base class; use {self._example}.")

    type = property(attrgetter("_type"), doc="The member of the enumeration of such algorithms.")
    is_optimal = property(attrgetter("_is_optimal"), doc="Is the answer the best one?")
