# SPDX-License-Identifier: Apache-2.0
"""Do the ranks of a group hold the same batch? Plans tell of lengths alone; digests of tokens and labels travel beside
the number of labels, which a Trainer sums anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch

from magi_attention.errors import PlanMismatchError


class SameTokens:
    """``total`` starts a comparison and ``check`` ends it, later in the step: nobody waits for a GPU between."""

    def __init__(self, cp_size: int) -> None:
        self._cp_size = cp_size
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def total(
        self, labels: torch.Tensor, digests: list[int], device: torch.device, gather: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """The labels of all ranks. ``gather`` gives (ranks, 2) of what each rank brings."""
        digest = sum(value * (2 * i + 1) for i, value in enumerate(digests)) % 2**62
        mine = torch.tensor([[int(labels), digest]], dtype=torch.int64).to(device)
        everyone = gather(mine)
        if everyone.is_cuda:
            host = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
            host.copy_(everyone, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = host, event
        else:
            self._pending = everyone, None
        return everyone[:, 0].sum()

    def check(self) -> None:
        """``PlanMismatchError``, on every rank, if two ranks of a group brought different digests."""
        if self._pending is None:
            return
        (host, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        digests = host[:, 1].view(-1, self._cp_size)
        for first, of_group in zip(range(0, digests.numel(), self._cp_size), digests.tolist()):
            odd = [first + i for i, digest in enumerate(of_group) if digest != of_group[0]]
            if odd:
                raise PlanMismatchError(
                    f"Ranks {', '.join(map(str, odd))} hold other tokens or labels than rank {first}, with which they "
                    "share sequences. All ranks of a group need the same examples: seed the data set, its shuffling "
                    "and what is random in a collator alike on all of them."
                )
