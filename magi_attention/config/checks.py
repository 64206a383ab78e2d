# SPDX-License-Identifier: Apache-2.0
"""Checks of config fields; each raises ``ContractError`` that names field, value and remedy."""

from __future__ import annotations

from numbers import Integral, Real

from magi_attention.errors import ContractError


def check_positive_int(owner: str, name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value <= 0:
        raise ContractError(f"{owner}.{name} is {value!r}; give an integer of at least 1.")


def check_not_negative_int(owner: str, name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ContractError(f"{owner}.{name} is {value!r}; give an integer of at least 0.")


def check_fraction(owner: str, name: str, value: object) -> None:
    if not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ContractError(f"{owner}.{name} is {value!r}; give a number from 0 to 1.")
