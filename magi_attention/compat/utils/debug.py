# SPDX-License-Identifier: Apache-2.0
"""Attaching a remote debugger to chosen ranks."""

from __future__ import annotations

from magi_attention.env.general import remote_debug_ranks
from magi_attention.errors import ContractError

BASE_PORT = 37777


def is_debugged(rank: int, setting: str | None = None) -> bool:
    """Does ``MAGI_ATTENTION_ENABLE_REMOTE_DEBUG`` (or ``setting``) name this rank?

    ``false`` names none, ``true`` rank 0, ``all`` every one; else a comma list of ranks.
    """
    setting = remote_debug_ranks() if setting is None else setting
    if setting in ("", "false", "0"):
        return False
    if setting in ("all", "true"):
        return setting == "all" or rank == 0
    try:
        return rank in {int(part) for part in setting.split(",")}
    except ValueError:
        raise ContractError(
            f"MAGI_ATTENTION_ENABLE_REMOTE_DEBUG={setting!r}: use false, true, all or ranks such as 0,3."
        ) from None


def debugpy_listen() -> None:
    """Waits for a debugger on 127.0.0.1, port 37777 + rank, if this rank is named; else returns at once.

    Raises:
        ImportError: debugpy is missing.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not is_debugged(rank):
        return
    import debugpy

    debugpy.listen(("127.0.0.1", BASE_PORT + rank))
    print(f"rank {rank} waits for a debugger on 127.0.0.1:{BASE_PORT + rank}", flush=True)
    debugpy.wait_for_client()
