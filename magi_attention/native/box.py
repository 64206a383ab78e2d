# SPDX-License-Identifier: Apache-2.0
"""Launches of ``csrc/include/magi/box.h``: prepared once, then a pack of addresses and a C call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from magi_attention.native import abi
from magi_attention.native.loader import check, load
from magi_attention.native.toolchain import FFA_SM90


def control_bytes(world: int) -> int:
    """Bytes of the control words at the start of a box."""
    return load(FFA_SM90).magi_box_control_bytes(world)


class _Launch:
    """A parameter block whose last addresses each call gives."""

    def __init__(self, function: str, prefix: bytes, what: str) -> None:
        self._library = load(FFA_SM90)
        self._call = getattr(self._library, function)
        self._prefix, self._what = prefix, what

    def _run(self, tail: bytes) -> None:
        status = self._call(self._prefix + tail)
        if status:
            check(self._library, status, self._what)


def _three(values: Sequence[int]) -> list[int]:
    return [*values, *[0] * (abi.BOX_TENSORS - len(values))]


class Push(_Launch):
    """``magi_box_push``; ``fields`` are those of its parameters, lists for arrays."""

    def __init__(self, **fields) -> None:
        params = self.params = _filled(abi.BoxPushParams, fields)  # for attention that pushes its own k and v
        super().__init__("magi_box_push", params[: abi.BOX_PUSH_PREFIX_BYTES], "Pushing rows to other ranks")

    def __call__(self, sources: Sequence[int], stream: int) -> None:
        """``sources``: an address for each tensor."""
        self._run(abi.BOX_PUSH_TAIL.pack(*_three(sources), stream))


class Take(_Launch):
    """``magi_box_take``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.BoxTakeParams, fields)
        super().__init__("magi_box_take", params[: abi.BOX_TAKE_PREFIX_BYTES], "Copying rows out of a box")

    def __call__(self, out: Sequence[int], stream: int) -> None:
        """``out``: an address for each tensor."""
        self._run(abi.BOX_TAKE_TAIL.pack(*_three(out), stream))


class Add(_Launch):
    """``magi_box_add``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.BoxAddParams, fields)
        super().__init__("magi_box_add", params[: abi.BOX_ADD_PREFIX_BYTES], "Adding rows as they arrive")

    def __call__(self, own: Sequence[int], base: Sequence[int], out: Sequence[int], stream: int) -> None:
        """Addresses for each tensor; 0 in ``base`` where there is nothing to add to."""
        self._run(abi.BOX_ADD_TAIL.pack(*_three(own), *_three(base), *_three(out), stream))


class Reduce(_Launch):
    """``magi_box_reduce``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.BoxReduceParams, fields)
        super().__init__("magi_box_reduce", params[: abi.BOX_REDUCE_PREFIX_BYTES], "Adding rows of other ranks")

    def __call__(self, base: Sequence[int], out: Sequence[int], event: int, stream: int) -> None:
        """Addresses for each tensor; 0 in ``base`` where there is nothing to add to. ``event`` is recorded behind it, 0
        for none."""
        self._run(abi.BOX_REDUCE_TAIL.pack(*_three(base), *_three(out), event, stream))


def _filled(kind: type[ctypes.Structure], fields: dict) -> bytes:
    params = kind(version=abi.ABI_VERSION)
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            array = getattr(params, name)
            for i, item in enumerate(value):
                array[i] = item
        else:
            setattr(params, name, value)
    return bytes(params)
