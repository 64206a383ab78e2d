# SPDX-License-Identifier: Apache-2.0
"""What checkpointed blocks keep, in host memory; copies run beside the blocks.

torch's ``save_on_cpu`` copies on the stream of the blocks, and its host waits. Here the same hooks of autograd copy
on a stream of their own: in the forward the input of a block leaves while the block runs, and in the backward the
input of the block before arrives meanwhile. Inputs of two blocks are on the GPU at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# A tensor of a block: the numbers of both. Tensors without elements are kept as they are.
Packed = tuple[int, int] | Tensor


class OffloadedInputs(AbstractContextManager["OffloadedInputs"]):
    """Around checkpointed blocks that follow one another, in one forward; the backward takes them in reverse order.

        with OffloadedInputs(device) as offloaded:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)

    ``pack`` and ``unpack`` do the same for what else a block keeps, here for its attention:
    ``context_fn=partial(keep_attention, offloaded.pack, offloaded.unpack)``. All blocks keep tensors of the same
    shapes and dtypes, in the same order. One object is of one forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._hooks: saved_tensors_hooks | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: list[list[Tensor]] = []
        self._leaving: list[Tensor] = []
        self._left: torch.cuda.Event | None = None
        self._places: list[list[Tensor]] = []  # on the GPU, of the blocks with even and odd numbers
        self._arrived: dict[int, torch.cuda.Event | None] = {}

    def __enter__(self) -> OffloadedInputs:
        self._hooks = saved_tensors_hooks(self._pack_input, self.unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        # The hooks hold this object. Without them it goes with the graph, and its memory does not wait for gc.
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        self._hooks = None

    @property
    def host_bytes(self) -> int:
        return sum(x.nbytes for block in self._host for x in block)

    def _beside(self) -> AbstractContextManager:
        """Copies begin when all that is launched so far is done."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _pack_input(self, x: Tensor) -> Packed:
        if not x.numel():  # of checkpoint itself
            return x
        _wait(self._left)  # the block before has run, so what it keeps may go when its copies are done
        self._leaving.clear()
        self._host.append([])
        return self.pack(x)

    def pack(self, x: Tensor) -> Packed:
        if not x.numel():
            return x
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self._stream is not None)
        with self._beside():
            host.copy_(x, non_blocking=True)
        self._leaving.append(x)
        self._left = self._event()
        self._host[-1].append(host)
        return len(self._host) - 1, len(self._host[-1]) - 1

    def unpack(self, packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        block, number = packed
        if not self._places:
            like = [torch.empty_like(x, device=self._device) for x in self._host[-1]]
            self._places = [like, [torch.empty_like(x) for x in like]][: len(self._host)]
            self._leaving.clear()
        if number == 0:  # the input, which a block asks for first
            if block not in self._arrived:
                self._bring(block)
            _wait(self._arrived.pop(block))
            if block:
                self._bring(block - 1)
        return self._places[block % 2][number]

    def _bring(self, block: int) -> None:
        """Into the places of the block two further on, whose backward has been launched."""
        with self._beside():
            for place, host in zip(self._places[block % 2], self._host[block]):
                place.copy_(host, non_blocking=True)
        self._arrived[block] = self._event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


__all__ = ["OffloadedInputs"]
