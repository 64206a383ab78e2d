# SPDX-License-Identifier: Apache-2.0
"""The rates of this machine, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.config.rates import MachineRates, find_rates, rates_file, read_rates
from magi_attention.errors import ContractError


def device_name(device: torch.device | str | None = None) -> str:
    """The name of a GPU, by which rates are kept, or CPU; by default of the GPU in use, if there is one."""
    is_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(None if device is None else torch.device(device)) if is_gpu else "CPU"


def load_rates(
    group: Any = None, *, device: torch.device | str | None = None, path: str | Path | None = None
) -> MachineRates:
    """What `magi tune` measured on a machine like this: rank 0 reads its file, and all ranks of ``group`` get that.

    The entry is that of rank 0's ``device`` (by default the GPU in use, else the CPU), of this version of the package,
    and of the number of ranks that is nearest to the group's. ``path`` is by default ``MAGI_ATTENTION_RATES_FILE``, or
    ``~/.cache/magi_attention/rates.json``. Collective over the group: call it once, and give the result to
    ``make_plan(rates=)``. ``ContractError``, on all ranks, if there is no such entry.
    """
    is_single = group is None and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    transport = SingleTransport() if is_single else as_transport(group)
    mine: MachineRates | str = ""
    if transport.rank == 0:
        try:
            mine = _read(Path(path) if path else rates_file(), device_name(device), transport.size)
        except ContractError as error:
            mine = str(error)
    found = transport.all_gather_object(mine)[0]
    if isinstance(found, str):
        raise ContractError(found)
    return found


def _read(path: Path, device: str, ranks: int) -> MachineRates:
    found = find_rates(read_rates(path), device, ranks)
    if found is None:
        raise ContractError(
            f"{path} has no rates of {device} for this version of the package; run `magi tune` on that machine, or "
            "leave rates= out."
        )
    return found
