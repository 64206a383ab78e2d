# SPDX-License-Identifier: Apache-2.0
"""Process groups of torch.distributed: is one of this process and alive, and what is attached to it until its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

from magi_attention.errors import ContractError

DESTROYED = (
    "The process group was destroyed (torch.distributed.destroy_process_group), and keys made for it ended "
    "with it. Make a group, and the key again for it; a plan goes on, with the new group."
)


def check_member(group: object) -> None:
    """``ContractError`` for what ``dist.new_group`` returns where this process is no member of the new group."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ContractError(
            f"This process (global rank {dist.get_rank()}) is not a member of the group: where dist.new_group made one "
            "without it, it returned GroupMember.NON_GROUP_MEMBER, which was passed on. Only members may call; leave "
            "the call out on other ranks, or pass a group that contains this one."
        )


def check_group(group: object) -> None:
    """``ContractError`` unless ``group`` is a process group that contains this process."""
    check_member(group)
    if not isinstance(group, dist.ProcessGroup):
        raise ContractError(
            f"{group!r} is no process group of this process; pass a ProcessGroup that contains it, a "
            "Transport, or None."
        )


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Was ``destroy_process_group`` called for it? Gloo would go on moving bytes, NCCL would not."""
    return group not in dist.distributed_c10d._world.pg_group_ranks


class _Ranks(dict):
    """The ranks of a group in torch's table. They go when the group is destroyed, whoever still refers to that."""


def ranks_in_table(group: dist.ProcessGroup) -> _Ranks:
    table = dist.distributed_c10d._world.pg_group_ranks
    if not isinstance(table[group], _Ranks):
        table[group] = _Ranks(table[group])
    return table[group]


def at_destruction(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Has ``action`` called when the group is destroyed, and not at the end of the process. It must not refer to it."""
    weakref.finalize(ranks_in_table(group), action).atexit = False


def check_alive(group: dist.ProcessGroup) -> None:
    if is_destroyed(group):
        raise ContractError(DESTROYED)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that the group's own operations may take: the longest, where it has a backend for each device. Backends
    that tell of none (MPI) have torch's default."""
    backends = [group._get_backend(device) for device in group._device_types]
    options = [backend.options for backend in backends if hasattr(backend, "options")]
    times = [limits._timeout.total_seconds() for limits in options]
    return max(times, default=dist.distributed_c10d.default_pg_timeout.total_seconds())


def attached(group: dist.ProcessGroup) -> dict:
    """What this package remembers of a group. It lives in torch's own table of groups, because a group has no
    attributes and this package keeps no process-wide state below its api layer."""
    world = dist.distributed_c10d._world
    table = world.__dict__.setdefault("_magi_attention", weakref.WeakKeyDictionary())
    return table.setdefault(group, {})
