# SPDX-License-Identifier: Apache-2.0
"""Launches of ``csrc/include/magi/symm.h``: prepared once, then a pack of addresses and a C call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from magi_attention.native import abi
from magi_attention.native.families import SM90
from magi_attention.native.loader import check, load


def control_bytes(world: int) -> int:
    """Bytes of the control words at the start of a buffer."""
    return load(SM90.library).magi_symm_control_bytes(world)


class _Launch:
    """A prepared launch, whose last addresses each call gives. ``fields`` are those of ``struct``, lists for arrays."""

    function: ClassVar[str]
    what: ClassVar[str]  # for errors
    struct: ClassVar[type[ctypes.Structure]]
    prefix_bytes: ClassVar[int]

    def __init__(self, **fields: Any) -> None:
        self._library = load(SM90.library)
        self._call = getattr(self._library, self.function)
        self.params = _filled(self.struct, fields)
        self._prefix = self.params[: self.prefix_bytes]

    def _run(self, tail: bytes) -> None:
        status = self._call(self._prefix + tail)
        if status:
            check(self._library, status, self.what)


def _three(values: Sequence[int]) -> list[int]:
    return [*values, *[0] * (abi.SYMM_TENSORS - len(values))]


class Put(_Launch):
    """Attention that puts its own k and v reads ``params``."""

    function, what = "magi_symm_put", "Pushing rows to other ranks"
    struct, prefix_bytes = abi.SymmPutParams, abi.SYMM_PUT_PREFIX_BYTES

    def __call__(self, sources: Sequence[int], stream: int) -> None:
        """``sources``: an address for each tensor."""
        self._run(abi.SYMM_PUT_TAIL.pack(*_three(sources), stream))


class Unpack(_Launch):
    function, what = "magi_symm_unpack", "Copying rows out of a buffer"
    struct, prefix_bytes = abi.SymmUnpackParams, abi.SYMM_UNPACK_PREFIX_BYTES

    def __call__(self, out: Sequence[int], stream: int) -> None:
        """``out``: an address for each tensor."""
        self._run(abi.SYMM_UNPACK_TAIL.pack(*_three(out), stream))


class RecvReduce(_Launch):
    function, what = "magi_symm_recv_reduce", "Adding rows as they arrive"
    struct, prefix_bytes = abi.SymmRecvReduceParams, abi.SYMM_RECV_REDUCE_PREFIX_BYTES

    def __call__(self, own: Sequence[int], base: Sequence[int], out: Sequence[int], stream: int) -> None:
        """Addresses for each tensor; 0 in ``base`` where there is nothing to add to."""
        self._run(abi.SYMM_RECV_REDUCE_TAIL.pack(*_three(own), *_three(base), *_three(out), stream))


class Reduce(_Launch):
    function, what = "magi_symm_reduce", "Adding rows of other ranks"
    struct, prefix_bytes = abi.SymmReduceParams, abi.SYMM_REDUCE_PREFIX_BYTES

    def __call__(self, base: Sequence[int], out: Sequence[int], event: int, stream: int) -> None:
        """Addresses for each tensor; 0 in ``base`` where there is nothing to add to. ``event`` is recorded behind it, 0
        for none."""
        self._run(abi.SYMM_REDUCE_TAIL.pack(*_three(base), *_three(out), event, stream))


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
