# SPDX-License-Identifier: Apache-2.0
"""The kernels of index attention behind a small object: one method per C function, statuses as exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from magi_attention.errors import UnsupportedError
from magi_attention.native import abi
from magi_attention.native.index.abi import (
    FUNCTIONS,
    IndexBwdKeysParams,
    IndexBwdParams,
    IndexFwdBlocksParams,
    IndexFwdParams,
    IndexPrepareParams,
    IndexSumParams,
)
from magi_attention.native.loader import check

MOST_ENTRIES = 226 * 8192  # that a list may be of, a bit of shared memory each


class IndexLibrary:
    """Calls of the kernels of index attention of a loaded library. Addresses are integers; nothing is allocated.

    Raises:
        UnsupportedError: the library has none, as one of a single variant that was compiled at first use.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        try:
            for name, (result, arguments) in FUNCTIONS.items():
                entry = getattr(library, name)
                entry.restype, entry.argtypes = result, arguments
        except AttributeError:
            raise UnsupportedError(f"The library of attention kernels has no {name}; build it anew.") from None

    def has(self, dtype: int, head_dim: int, head_dim_v: int, has_v: bool = True) -> bool:
        """Are there kernels of both directions whose tiles hold these head dims? ``has_v`` False: in MLA's form."""
        return bool(self._library.magi_ffa_index_has_variant(dtype, head_dim, head_dim_v, has_v))

    def tiles(self, heads_q: int, heads_kv: int, q_block: int, has_v: bool = True) -> int:
        """Into how many tiles the rows of a list of ``q_block`` tokens are cut; 0 if there is no kernel for them."""
        found: int = self._library.magi_ffa_index_tiles(heads_q, heads_kv, q_block, has_v)
        return found

    def forward(self, **fields: int | float) -> None:
        """``magi_ffa_index_fwd`` with the fields of ``IndexFwdParams``."""
        params = IndexFwdParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_fwd(ctypes.byref(params)), "Index attention forward")

    def forward_by_blocks(self, **fields: int | float) -> None:
        """``magi_ffa_index_fwd_blocks`` with the fields of ``IndexFwdBlocksParams``."""
        params = IndexFwdBlocksParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_fwd_blocks(ctypes.byref(params)), "Index attention forward")

    def backward(self, **fields: int | float | None) -> None:
        """``magi_ffa_index_bwd`` with the fields of ``IndexBwdParams``."""
        params = IndexBwdParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_bwd(ctypes.byref(params)), "Index attention backward")

    def backward_by_keys(self, allocate: Callable[[int], int], **fields: int | float) -> None:
        """``magi_ffa_index_bwd_keys`` with the fields of ``IndexBwdKeysParams``.

        ``allocate`` gives the address of so many bytes of device memory, at a multiple of 128.
        """
        params, need = IndexBwdKeysParams(version=abi.ABI_VERSION, **fields), ctypes.c_int64()
        what = "Index attention backward"
        self._check(self._library.magi_ffa_index_bwd_keys_workspace(ctypes.byref(params), ctypes.byref(need)), what)
        params.workspace, params.workspace_bytes = allocate(need.value), need.value
        self._check(self._library.magi_ffa_index_bwd_keys(ctypes.byref(params)), what)

    def sum_shares(self, **fields: int) -> None:
        """``magi_ffa_index_sum`` with the fields of ``IndexSumParams``."""
        params = IndexSumParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_sum(ctypes.byref(params)), "Index attention backward")

    def prepare(self, **fields: int | None) -> None:
        """``magi_ffa_index_prepare`` with the fields of ``IndexPrepareParams``; of ``MOST_ENTRIES`` at most."""
        params = IndexPrepareParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_prepare(ctypes.byref(params)), "Preparing lists")

    def blocks(self, **fields: int) -> None:
        """``magi_ffa_index_blocks`` with the fields of ``IndexPrepareParams``."""
        params = IndexPrepareParams(version=abi.ABI_VERSION, **fields)
        self._check(self._library.magi_ffa_index_blocks(ctypes.byref(params)), "Making lists of blocks")

    def _check(self, status: int, what: str) -> None:
        check(self._library, status, what)
