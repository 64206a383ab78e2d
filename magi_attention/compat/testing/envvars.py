# SPDX-License-Identifier: Apache-2.0
"""Environment variables in tests: switching them, and filtering cases by them."""

from __future__ import annotations

import enum
import fnmatch
import functools
import os
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from magi_attention.env import registry
from magi_attention.errors import ContractError

_FILTER = f"{registry.PREFIX}TEST_"


def switch_envvars(
    envvar_name_list: Sequence[str],
    enable_dict: Mapping[str, bool] | None = None,
    enable_value_dict: Mapping[str, str] | None = None,
    disable_value_dict: Mapping[str, str] | None = None,
) -> Callable[[], None]:
    """Sets variables and returns the function that restores what was before.

    A variable is enabled unless ``enable_dict`` says False; it then gets ``enable_value_dict[name]`` (``1``
    if absent), else ``disable_value_dict[name]`` (``0`` if absent).
    """
    before = {name: os.environ.get(name) for name in envvar_name_list}
    for name in envvar_name_list:
        if (enable_dict or {}).get(name, True):
            os.environ[name] = (enable_value_dict or {}).get(name, "1")
        else:
            os.environ[name] = (disable_value_dict or {}).get(name, "0")

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


@contextmanager
def switch_envvar_context(
    envvar_name: str | Sequence[str],
    enable: bool = True,
    enable_value: str = "1",
    disable_value: str = "0",
) -> Iterator[None]:
    """Inside, the variables are on (or off); afterwards they are what they were."""
    names = [envvar_name] if isinstance(envvar_name, str) else list(envvar_name)
    restore = switch_envvars(
        names,
        dict.fromkeys(names, enable),
        dict.fromkeys(names, enable_value),
        dict.fromkeys(names, disable_value),
    )
    try:
        yield
    finally:
        restore()


def switch_envvar_decorator(
    envvar_name: str | Sequence[str],
    enable: bool = True,
    enable_value: str = "1",
    disable_value: str = "0",
) -> Callable[[Callable], Callable]:
    """``switch_envvar_context`` around every call of a function."""

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def wrapped(*args, **kwargs):
            with switch_envvar_context(envvar_name, enable, enable_value, disable_value):
                return func(*args, **kwargs)

        return wrapped

    return decorate


def _matches(what: str, value: object) -> bool:
    """Does the filter let ``value`` through, a dictionary by its entry ``name``, an enumeration's member by value?"""
    if isinstance(value, Mapping):
        value = value.get("name", value)
    if isinstance(value, enum.Enum):
        value = value.value
    patterns = [p.strip() for p in registry.get(_FILTER + what).split(",") if p.strip()]
    return not patterns or any(fnmatch.fnmatchcase(str(value), pattern) for pattern in patterns)


def should_run_world_size(world_size: int) -> bool:
    """Does ``MAGI_ATTENTION_TEST_WORLD_SIZE`` let this one through? Unset lets all through."""
    return _matches("WORLD_SIZE", world_size)


def should_run_attn_config(name: str) -> bool:
    """Does ``MAGI_ATTENTION_TEST_ATTN_CONFIG`` let this one through? Unset lets all through."""
    return _matches("ATTN_CONFIG", name)


def should_run_test_case(**case: object) -> bool:
    """Do all filters ``MAGI_ATTENTION_TEST_<NAME>`` let the case through?

    Keywords: world_size, attn_config, num_heads, head_dim, dtype, backend, overlap_config, random_type_mapping.

    Raises:
        ContractError: there is no filter for a keyword.
    """
    known = [name.removeprefix(_FILTER).lower() for name in registry.VARIABLES if name.startswith(_FILTER)]
    for name in case:
        if name not in known:
            raise ContractError(f"No variable filters test cases by {name!r}; use {', '.join(known)}.")
    return all([_matches(name.upper(), value) for name, value in case.items()])


def skip_if_world_size_filtered(func: Callable) -> Callable:
    """Skips a method of a test with ``world_size`` that the filter does not let through."""

    @functools.wraps(func)
    def wrapped(self, *args, **kwargs):
        if not should_run_world_size(self.world_size):
            raise unittest.SkipTest(f"MAGI_ATTENTION_TEST_WORLD_SIZE leaves out {self.world_size} ranks")
        return func(self, *args, **kwargs)

    return wrapped
