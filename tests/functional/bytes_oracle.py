# SPDX-License-Identifier: Apache-2.0
"""What caches say, counted independently: the arrays and tensors that can be reached from an object of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

ELSEWHERE = ("magi_attention.comm.transport", "magi_attention.kernels.registry", "magi_attention.comm.symm.buffers")


def reached_bytes(*roots: object) -> int:
    """Bytes of all arrays and tensors that are reached through attributes of our objects, dictionaries, lists and
    tuples, whoever holds them. Memory that several of them share counts once."""
    seen: set[int] = set()
    memory: dict[int, int] = {}
    todo: list[Any] = list(roots)
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        module = type(x).__module__
        if isinstance(x, (np.ndarray, torch.Tensor)):
            at = x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data
            memory[at] = max(memory.get(at, 0), x.nbytes)
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, (list, tuple)):
            todo += x
        elif module.startswith("magi_attention.") and not module.startswith(ELSEWHERE):
            slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(x, name) for name in slots if hasattr(x, name)] + list(getattr(x, "__dict__", {}).values())
    return sum(memory.values())
