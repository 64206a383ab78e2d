# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of blocks that keep what attention computed, so that its forward is not run again in the backward.

``torch.utils.checkpoint`` enters one context around the forward of a block and another around its recomputation. Calls
of attention in the first leave out and lse, and those in the second take them, in the same order. q, k and v are
computed again. It is the same for a compiled block: its calls run inside an op, which asks here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from magi_attention.errors import ContractError
from magi_attention.functional.stages.query_moves import Forward

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def keep_attention(
    pack: Pack | None = None, unpack: Unpack | None = None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``: out and lse of every
    ``attend`` and ``calc_attn`` stay for the backward.

        x = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

    ``pack`` and ``unpack``, as in ``torch.autograd.graph.saved_tensors_hooks``, say how they are kept, for example in
    host memory; give them by ``functools.partial``. All ranks keep attention, or none.
    """
    if (pack is None) != (unpack is None):
        raise ContractError("One of pack and unpack is missing; give both, or neither.")
    results = _Results(pack, unpack)
    return _Pass(results, is_again=False), _Pass(results, is_again=True)


class _Results:
    """Results of the calls of one checkpoint, in their order."""

    def __init__(self, pack: Pack | None, unpack: Unpack | None) -> None:
        self._pack, self._unpack = pack, unpack
        self._of_calls: list[tuple[Any, ...]] = []

    def put(self, got: Forward) -> None:
        tensors = (got.out, got.lse, got.max_logits, *got.tail)
        self._of_calls.append(tuple(None if x is None else self._packed(x.detach()) for x in tensors))

    def _packed(self, x: torch.Tensor) -> Any:
        return (x, x._version) if self._pack is None else self._pack(x)

    def get(self, number: int, q: torch.Tensor, v: torch.Tensor) -> Forward:
        if number >= len(self._of_calls):
            raise ContractError(
                f"A checkpointed block called attention {len(self._of_calls)} times in the forward and once more when "
                "it was computed again; let it call attention the same way both times, or leave keep_attention out."
            )
        out, lse, max_logits, *tail = (None if x is None else self._tensor(x) for x in self._of_calls[number])
        assert out is not None and lse is not None
        if out.shape != (*q.shape[:2], v.shape[2]):
            raise ContractError(
                f"Call {number} of attention in a checkpointed block gave {tuple(out.shape)} in the forward, and q "
                f"is {tuple(q.shape)} now that it is computed again; let the block call attention in the same order "
                "both times, or leave keep_attention out."
            )
        return Forward(out, lse, max_logits, tuple(x for x in tail if x is not None))

    def _tensor(self, packed: Any) -> torch.Tensor:
        if self._unpack is not None:
            return self._unpack(packed).detach()
        x: torch.Tensor
        x, version = packed
        if x._version != version:
            raise ContractError(
                "out of attention was changed in place, and a checkpoint keeps it for the backward; write out * x in "
                "place of out.mul_(x), or leave keep_attention out."
            )
        return x.detach()


class _Active(threading.local):
    """The pass of a checkpoint that this thread is in; a backward on GPUs has a thread of its own."""

    now: _Pass | None = None


_active = _Active()


class _Pass(AbstractContextManager[None]):
    """The forward of a checkpoint, or, ``is_again``, a recomputation. May be entered several times."""

    def __init__(self, results: _Results, is_again: bool) -> None:
        self.results, self.is_again = results, is_again
        self._next = 0
        self._outer: _Pass | None = None

    def __enter__(self) -> None:
        self._next, self._outer, _active.now = 0, _active.now, self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.now, self._outer = self._outer, None

    def number(self) -> int:
        self._next += 1
        return self._next - 1


def kept_result(q: torch.Tensor, v: torch.Tensor) -> Forward | None:
    """The result of this call, if a checkpoint that kept it is computed again."""
    now = _active.now
    return None if now is None or not now.is_again else now.results.get(now.number(), q, v)


def keep_result(got: Forward) -> None:
    """For the recomputation, where a checkpoint wants that."""
    if _active.now is not None:
        _active.now.results.put(got)
