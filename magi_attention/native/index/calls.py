# SPDX-License-Identifier: Apache-2.0
"""The kernels of index attention behind a small object: C functions, and prefixes of their parameters."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from magi_attention.errors import UnsupportedError
from magi_attention.native import abi
from magi_attention.native.families import SM90
from magi_attention.native.index import abi as index_abi
from magi_attention.native.loader import check, load

MOST_ENTRIES = 226 * 8192  # that a list may be of, a bit of shared memory each
BACKWARD = "Index attention backward"


class IndexLibrary:
    """The kernels of index attention of a loaded library. Addresses are integers; nothing is allocated.

    ``*_raw`` are bare functions (parameters as bytes) -> status. ``*_prefix`` give the parameters up to the addresses,
    from fields by name; ``index_abi.*_TAIL`` packs these.

    Raises:
        UnsupportedError: the library has none, as one of a single variant that was compiled at first use.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        try:
            for name, (result, arguments) in index_abi.FUNCTIONS.items():
                entry = getattr(library, name)
                entry.restype, entry.argtypes = result, arguments
        except AttributeError:
            raise UnsupportedError(f"The library of attention kernels has no {name}; build it anew.") from None
        self._bind()

    def _bind(self) -> None:
        self.forward_raw = self._entry("magi_ffa_index_fwd")
        self.forward_blocks_raw = self._entry("magi_ffa_index_fwd_blocks")
        self.backward_raw = self._entry("magi_ffa_index_bwd")
        self.backward_keys_raw = self._entry("magi_ffa_index_bwd_keys")
        self.sum_raw = self._entry("magi_ffa_index_sum")

    def _entry(self, name: str) -> Any:
        return getattr(self._library, name)

    def has(self, dtype: int, head_dim: int, head_dim_v: int, has_v: bool = True) -> bool:
        """Are there kernels of both directions whose tiles hold these head dims? ``has_v`` False: in MLA's form."""
        return bool(self._library.magi_ffa_index_has_variant(dtype, head_dim, head_dim_v, has_v))

    def tiles(self, heads_q: int, heads_kv: int, q_block: int, has_v: bool = True) -> int:
        """Into how many tiles the rows of a list of ``q_block`` tokens are cut; 0 if there is no kernel for them."""
        found: int = self._library.magi_ffa_index_tiles(heads_q, heads_kv, q_block, has_v)
        return found

    def forward_prefix(self, **fields: int | float) -> bytes:
        """``IndexFwdParams`` up to the addresses."""
        return _bytes(index_abi.IndexFwdParams, fields)[: index_abi.FWD_PREFIX_BYTES]

    def forward_blocks_prefix(self, **fields: int | float) -> bytes:
        """``IndexFwdBlocksParams`` up to the addresses."""
        return _bytes(index_abi.IndexFwdBlocksParams, fields)[: index_abi.FWD_BLOCKS_PREFIX_BYTES]

    def backward_prefix(self, **fields: int | float) -> bytes:
        """``IndexBwdParams`` up to the addresses."""
        return _bytes(index_abi.IndexBwdParams, fields)[: index_abi.BWD_PREFIX_BYTES]

    def backward_keys_prefix(self, **fields: int | float) -> tuple[bytes, int]:
        """``IndexBwdKeysParams`` up to the addresses, and the bytes of workspace that a call needs, in steps of 128.

        For the current device, because these depend on how many multiprocessors there are.
        """
        need = ctypes.c_int64()
        params = _bytes(index_abi.IndexBwdKeysParams, fields)
        self.check(self._entry("magi_ffa_index_bwd_keys_workspace")(params, ctypes.byref(need)), BACKWARD)
        params = _bytes(index_abi.IndexBwdKeysParams, {**fields, "workspace_bytes": need.value})
        return params[: index_abi.BWD_KEYS_PREFIX_BYTES], need.value

    def sum_prefix(self, **fields: int) -> bytes:
        """``IndexSumParams`` up to the addresses."""
        return _bytes(index_abi.IndexSumParams, fields)[: index_abi.SUM_PREFIX_BYTES]

    def prepare(self, **fields: int | None) -> None:
        """``magi_ffa_index_prepare`` with the fields of ``IndexPrepareParams``; of ``MOST_ENTRIES`` at most."""
        params = index_abi.IndexPrepareParams(version=abi.ABI_VERSION, **fields)
        self.check(self._entry("magi_ffa_index_prepare")(ctypes.byref(params)), "Preparing lists")

    def blocks(self, **fields: int) -> None:
        """``magi_ffa_index_blocks`` with the fields of ``IndexPrepareParams``."""
        params = index_abi.IndexPrepareParams(version=abi.ABI_VERSION, **fields)
        self.check(self._entry("magi_ffa_index_blocks")(ctypes.byref(params)), "Making lists of blocks")

    def indexer_topk(self, **fields: int | None) -> None:
        """``magi_ffa_indexer_topk`` with the fields of ``IndexerParams``."""
        params = index_abi.IndexerParams(version=abi.ABI_VERSION, **fields)
        self.check(self._entry("magi_ffa_indexer_topk")(ctypes.byref(params)), "The indexer")

    def indexer_kl_fwd(self, **fields: int | float) -> None:
        """``magi_ffa_indexer_kl_fwd`` with the fields of ``IndexerKlFwdParams``."""
        params = index_abi.IndexerKlFwdParams(version=abi.ABI_VERSION, **fields)
        self.check(self._entry("magi_ffa_indexer_kl_fwd")(ctypes.byref(params)), "The indexer's divergence")

    def indexer_kl_bwd(self, **fields: int) -> None:
        """``magi_ffa_indexer_kl_bwd`` with the fields of ``IndexerKlBwdParams``."""
        params = index_abi.IndexerKlBwdParams(version=abi.ABI_VERSION, **fields)
        self.check(self._entry("magi_ffa_indexer_kl_bwd")(ctypes.byref(params)), "Gradients of the indexer")

    def check(self, status: int, what: str) -> None:
        check(self._library, status, what)


def _bytes(kind: type[ctypes.Structure], fields: dict[str, Any]) -> bytes:
    return bytes(kind(version=abi.ABI_VERSION, **fields))


def load_index() -> IndexLibrary:
    """Those of this installation; ``UnsupportedError`` if there are none."""
    return bound_library(load(SM90.library))


@lru_cache(maxsize=4)
def bound_library(library: ctypes.CDLL) -> IndexLibrary:
    return IndexLibrary(library)
