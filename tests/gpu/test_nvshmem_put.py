# SPDX-License-Identifier: Apache-2.0
"""Processes, each on a GPU, put rows into one another's symmetric memory, several times, and find what was sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from places import over_nvshmem

from magi_attention.native.comm.nvshmem import Nvshmem

ROWS, WIDTH, ROUNDS = 1000, 128, 5


def exchange(rank: int, world: int) -> list[int]:
    """Rows of round i hold 100 i + rank and go to the next rank, which is this one where it is alone.

    Returns what came, one value per round, after all of them were equal.
    """
    torch.cuda.set_device(rank)
    library = Nvshmem()
    library.join(dist.distributed_c10d._get_default_store(), rank, world)
    num_bytes, seen = ROWS * WIDTH * 4, []
    inbox, signal, back = library.alloc(num_bytes), library.alloc(8), library.alloc(8)
    received = torch.empty(ROWS, WIDTH, dtype=torch.int32, device="cuda")
    stream, peer = torch.cuda.current_stream().cuda_stream, (rank + 1) % world
    nothing = torch.zeros(1, dtype=torch.int32, device="cuda")
    for i in range(1, ROUNDS + 1):
        rows = torch.full_like(received, 100 * i + rank)
        library.put_signal(inbox, rows.data_ptr(), num_bytes, signal, i, peer, stream)
        library.wait_signal(signal, i, stream)
        torch.cuda.synchronize()
        copy_from(inbox, received)
        first = int(received[0, 0])
        assert bool((received == first).all())
        seen.append(first)
        # Who sent them hears that the inbox was read, before the next rows come.
        library.put_signal(back, nothing.data_ptr(), 0, back, i, (rank - 1) % world, stream)
        library.wait_signal(back, i, stream)
        torch.cuda.synchronize()
    for address in (back, signal, inbox):
        library.free(address)
    library.leave()
    return seen


class _Memory:
    """Device memory at an address, as torch takes it."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i4", "data": (address, False), "version": 3}


def copy_from(address: int, out: torch.Tensor) -> None:
    """Copies symmetric memory into a tensor."""
    out.copy_(torch.as_tensor(_Memory(address, tuple(out.shape)), device=out.device))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_and_signals_arrive(world):
    seen = over_nvshmem(exchange, world, timeout_s=120.0)
    assert seen == [[100 * i + (rank - 1) % world for i in range(1, ROUNDS + 1)] for rank in range(world)]
