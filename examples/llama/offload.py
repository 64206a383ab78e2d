# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpointed blocks in host memory; copies run beside the blocks.

torch's ``save_on_cpu`` copies on the stream of the blocks, and its host waits. Here the same hooks of autograd copy
on a stream of their own: in the forward the input of a block leaves while the block runs, and in the backward the
input of the block before arrives meanwhile. Inputs of two blocks are on the GPU at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class OffloadedInputs(saved_tensors_hooks):
    """Around checkpointed blocks that follow one another, in one forward; the backward takes them in reverse order.

        with OffloadedInputs(device):
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)

    Tensors saved are alike in shape and dtype. One object is of one forward.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: list[Tensor] = []
        self._leaving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._places: list[Tensor] = []  # on the GPU, of the blocks with even and odd numbers
        self._arrived: dict[int, torch.cuda.Event | None] = {}

    def _beside(self) -> AbstractContextManager:
        """Copies begin when all that is launched so far is done."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _pack(self, x: Tensor) -> int | Tensor:
        if not x.numel():  # of checkpoint itself
            return x
        if self._leaving is not None:  # the block before has run, so its input may go when its copy is done
            _wait(self._leaving[1])
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self._stream is not None)
        with self._beside():
            host.copy_(x, non_blocking=True)
        self._leaving = x, self._event()
        self._host.append(host)
        return len(self._host) - 1

    def _unpack(self, saved: int | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._places:
            like, _ = self._leaving or (None, None)
            assert like is not None
            self._places = [torch.empty_like(like) for _ in range(min(2, len(self._host)))]
            self._leaving = None
        if saved not in self._arrived:
            self._bring(saved)
        _wait(self._arrived.pop(saved))
        if saved:
            self._bring(saved - 1)
        return self._places[saved % 2]

    def _bring(self, number: int) -> None:
        """Into the place of the block two further on, whose backward has been launched."""
        with self._beside():
            self._places[number % 2].copy_(self._host[number], non_blocking=True)
        self._arrived[number] = self._event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


__all__ = ["OffloadedInputs"]
