# SPDX-License-Identifier: Apache-2.0
"""Keys of other ranks, and a simulated backend whose launches beside them are written down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ffa_simulator import backend

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.peer_kv import TILE, RemoteKeys, RemoteMask
from magi_attention.native import abi
from magi_attention.native.ffa import FfaTile

ROWS = 32
PUSH = b"this rank's"


def remote_keys(num_summed: int = 1, put: bytes | None = PUSH) -> RemoteKeys:
    """32 local keys and one tile of remote ones, for 32 queries."""
    base = 2 * TILE
    slices = SliceTable(np.array([[0, ROWS, 0, ROWS, 1], [0, ROWS, base, base + 8, 0]]))
    mask = RemoteMask(slices, ROWS, base, np.zeros(1, dtype=np.int32), Pace(np.array([1e-3])), num_summed)
    return RemoteKeys(mask, bytes(abi.FFA_REMOTE_PREFIX_BYTES), put)


def remote_backend(launch: Callable[..., object] = lambda *_: None) -> FfaBackend:
    """``launch`` gets parameters, those of the remote keys and the put of each launch, forward and backward."""
    ffa, library = backend()
    library.forward_remote_raw = library.backward_remote_raw = lambda *given: (launch(*given[:3]), 0)[1]
    library.backward_tile = lambda *_: FfaTile(TILE, 2, 1)  # tiles of keys have one owner
    return ffa
