# SPDX-License-Identifier: Apache-2.0
"""Process groups, ranks and random states of scripts and tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def rprint_rank(msg: str, rank: int | None = None, width: int = 50) -> None:
    """Prints below a ruler, on one rank or, with None, on all."""
    if rank is None or rank == _rank():
        print(f"\n{f' rank {_rank()} ':-^{width}}\n{msg}", flush=True)


def write_rank(msg: str, path: str, rank: int | None = None, width: int = 50) -> None:
    """As ``rprint_rank``, appended to the file ``path``."""
    if rank is None or rank == _rank():
        with open(path, "a") as file:
            file.write(f"\n{f' rank {_rank()} ':-^{width}}\n{msg}\n")


def setup_dist_env(
    backend: str = "nccl",
    base_seed: int | None = None,
    seed_bias: Callable[[int], int] = lambda rank: 0,
) -> tuple[int, int, int, int, int, dist.ProcessGroup, int, int | None]:
    """Joins the process group that the launcher describes in RANK, WORLD_SIZE, LOCAL_RANK and so on.

    With a CUDA device, ``LOCAL_RANK`` becomes the current one. The seed ``base_seed + seed_bias(rank)`` is
    set unless ``base_seed`` is None.

    Returns:
        (rank, local_rank, world_size, num_nodes, num_local_ranks, world_group, device_index, seed).
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device_index = local_rank
    if torch.cuda.is_available():
        torch.cuda.set_device(device_index)
    if not dist.is_initialized():
        dist.init_process_group(backend=backend, rank=rank, world_size=world_size)
    seed = None
    if base_seed is not None:
        seed = base_seed + seed_bias(rank)
        set_random_seed(seed)
    num_nodes = -(-world_size // num_local_ranks)
    group = dist.group.WORLD
    assert group is not None  # initialised above
    return rank, local_rank, world_size, num_nodes, num_local_ranks, group, device_index, seed


def clearup_dist_env() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_random_seed(seed: int | None) -> None:
    """Seeds random, numpy and torch (all devices); None does nothing."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def sync_rng(seed: int) -> Iterator[None]:
    """Inside, all ranks draw the same numbers; afterwards the former random states are back."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        set_random_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def is_same_process_group(group1: dist.ProcessGroup | None, group2: dist.ProcessGroup | None) -> bool:
    """Do both hold the same global ranks? None is the same as None only."""
    if group1 is None or group2 is None:
        return group1 is group2
    return sorted(dist.get_process_group_ranks(group1)) == sorted(dist.get_process_group_ranks(group2))


def is_same_device_mesh(mesh1, mesh2) -> bool:
    """Do both meshes hold the same ranks in the same shape? None is the same as None only."""
    if mesh1 is None or mesh2 is None:
        return mesh1 is mesh2
    return mesh1.mesh.shape == mesh2.mesh.shape and bool((mesh1.mesh == mesh2.mesh).all())
