# SPDX-License-Identifier: Apache-2.0
"""Launches of ``csrc/include/magi/symm.h``: prepared once, then a pack of addresses and a C call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from magi_attention.native import abi
from magi_attention.native.families import SM90
from magi_attention.native.loader import check, load


def control_bytes(world: int) -> int:
    """Bytes of the control words at the start of a buffer."""
    return load(SM90.library).magi_symm_control_bytes(world)


class _Launch:
    """A parameter block whose last addresses each call gives."""

    def __init__(self, function: str, prefix: bytes, what: str) -> None:
        self._library = load(SM90.library)
        self._call = getattr(self._library, function)
        self._prefix, self._what = prefix, what

    def _run(self, tail: bytes) -> None:
        status = self._call(self._prefix + tail)
        if status:
            check(self._library, status, self._what)


def _three(values: Sequence[int]) -> list[int]:
    return [*values, *[0] * (abi.SYMM_TENSORS - len(values))]


class Put(_Launch):
    """``magi_symm_put``; ``fields`` are those of its parameters, lists for arrays."""

    def __init__(self, **fields) -> None:
        params = self.params = _filled(abi.SymmPutParams, fields)  # for attention that puts its own k and v
        super().__init__("magi_symm_put", params[: abi.SYMM_PUT_PREFIX_BYTES], "Pushing rows to other ranks")

    def __call__(self, sources: Sequence[int], stream: int) -> None:
        """``sources``: an address for each tensor."""
        self._run(abi.SYMM_PUT_TAIL.pack(*_three(sources), stream))


class Unpack(_Launch):
    """``magi_symm_unpack``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.SymmUnpackParams, fields)
        super().__init__("magi_symm_unpack", params[: abi.SYMM_UNPACK_PREFIX_BYTES], "Copying rows out of a buffer")

    def __call__(self, out: Sequence[int], stream: int) -> None:
        """``out``: an address for each tensor."""
        self._run(abi.SYMM_UNPACK_TAIL.pack(*_three(out), stream))


class RecvReduce(_Launch):
    """``magi_symm_recv_reduce``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.SymmRecvReduceParams, fields)
        super().__init__(
            "magi_symm_recv_reduce", params[: abi.SYMM_RECV_REDUCE_PREFIX_BYTES], "Adding rows as they arrive"
        )

    def __call__(self, own: Sequence[int], base: Sequence[int], out: Sequence[int], stream: int) -> None:
        """Addresses for each tensor; 0 in ``base`` where there is nothing to add to."""
        self._run(abi.SYMM_RECV_REDUCE_TAIL.pack(*_three(own), *_three(base), *_three(out), stream))


class Reduce(_Launch):
    """``magi_symm_reduce``."""

    def __init__(self, **fields) -> None:
        params = _filled(abi.SymmReduceParams, fields)
        super().__init__("magi_symm_reduce", params[: abi.SYMM_REDUCE_PREFIX_BYTES], "Adding rows of other ranks")

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
