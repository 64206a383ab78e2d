# SPDX-License-Identifier: Apache-2.0
"""Masks and operands of attention over local keys and keys that other ranks put while the kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.arrival import Pace, backward_order, forward_order, there_at
from magi_attention.kernels.ffa.operands import DTYPES
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, Kept, PlanShape
from magi_attention.kernels.reference.correction import sink_bwd_from_delta
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary
from magi_attention.native.planner.schedule import with_schedule
from magi_attention.native.planner.tile_plan import TilePlan

TILE = 128  # remote keys come in tiles that have one owner
NO_TOKENS = "This rank has no tokens, and attention in one launch needs some; use fewer ranks."


class RemoteMask:
    """Slices over ``local_keys`` local keys and remote ones, which begin at ``base``; made once per plan and shapes.

    ``arrivals`` (T,) is the number of the signal by which each of the T tiles of remote keys comes; the forward waits
    for signals in this order. The ``pace`` at which they arrive decides in which order tiles are taken.

    To ``num_summed`` tiles of local keys other ranks add gradients: those are left in float32, of the others they are
    done.

    Pad rows of the buffer hold zeros and the copy engine fills the gap with them, so unlike local keys that no query
    sees they need no clearing: the plans say so.
    """

    def __init__(
        self, slices: SliceTable, local_keys: int, base: int, arrivals: np.ndarray, pace: Pace, num_summed: int
    ) -> None:
        self.slices, self.local_keys, self.base, self.arrivals, self.pace = slices, local_keys, base, arrivals, pace
        self.num_summed = num_summed
        self.rows = TILE * len(arrivals)
        self.total_k = base + self.rows
        self.cache = PlanCache()
        self.cache.include(slices.cache)

    @property
    def num_signals(self) -> int:
        return int(self.arrivals.max(initial=-1)) + 1

    def plan(self, shape: PlanShape, device: torch.device) -> Kept:
        """The tile plan on ``device``, without a work list, which calls beside remote keys do not take; kept. The
        first call copies and waits."""

        def make() -> Kept:
            words = self._transposed(shape) if shape.is_transposed else self._forward(shape)
            plan = torch.from_numpy(words).to(device)
            return Kept(plan, plan.data_ptr(), None)

        return self.cache.get(DEVICE_PLANS, (shape, device), make)

    def _forward(self, shape: PlanShape) -> np.ndarray:
        tile = shape.tile
        words = TilePlan.of_table(self.slices, shape.total_q, shape.total_k, tile.tokens, tile.groups).words.copy()
        plan = TilePlan(words)
        unseen = np.concatenate([[0], np.cumsum(~_seen(self.slices.array, self.local_keys))])
        abi.TilePlanHeader.from_buffer(words.data).has_unseen = int(unseen[-1] > 0)
        records = plan.records  # views of words
        low = np.clip(records[:, 0] - (TILE - 1), 0, self.local_keys)
        high = np.clip(records[:, 1], 0, self.local_keys)
        records[:, _HAS_UNSEEN] = unseen[np.maximum(high, low)] > unseen[low]
        return forward_order(words, self.pace, self.arrivals, self.base, TILE)

    def _transposed(self, shape: PlanShape) -> np.ndarray:
        tile = shape.tile
        plan = TilePlan.of_table(self.slices, shape.total_q, shape.total_k, tile.tokens, tile.groups, True)
        words = backward_order(plan.words.copy(), self.pace, self.arrivals, self.base)
        if shape.schedule is None or shape.schedule.list_block_m:  # calls beside remote keys take no work list
            return words
        return with_schedule(words, shape.schedule, there_at(shape.tile.tokens, self.pace, self.arrivals, self.base))


class RemoteKeys:
    """``mask``, and ``params``, the bytes of ``magi_ffa_remote`` but the addresses of sums, whose memory the caller
    holds; for k and v of one layout, dtype and device, and for one direction.

    ``put``, the bytes of ``magi_symm_put_params`` without addresses, is this rank's put, if it goes with the launch.
    ``known`` is where a backend keeps calls that it has prepared, by what of the other operands they depend on.
    """

    def __init__(self, mask: RemoteMask, params: bytes, put: bytes | None = None) -> None:
        self.mask, self.params, self.put = mask, params, put
        self.forward_params = params + bytes(abi.FFA_REMOTE_TAIL.size)  # nothing is summed
        self.known: dict[tuple[object, ...], Any] = {}


Result = TypeVar("Result")


class FusedLaunch(Generic[Result]):
    """A launch beside keys that arrive, when all that comes before it has been launched: casts of inputs, cleared
    workspaces. A context, inside which ``launch`` is called once:

        with backend.forward_fused(x, remote) as ready:
            ...  # launches of the caller's own: the kernel starts beside them and does not wait for them
            ready.launch()

    Inside, the operands' device is the current one, and its stream is behind the kernels that this one is to follow.
    ``result`` is written when the kernel has ended. ``held`` lives until the launch.
    """

    def __init__(
        self, library: FfaLibrary, raw: Callable[..., int], args: tuple[object, ...], what: str, result: Result,
        held: object, turn: AbstractContextManager[Any] | None = None,
    ) -> None:  # fmt: skip
        self._library, self._raw, self._args, self._what, self._held = library, raw, args, what, held
        self.result = result
        self._contexts, self._entered = [] if turn is None else [turn], ExitStack()

    def inside(self, context: AbstractContextManager[Any]) -> FusedLaunch[Result]:
        """The same in one more context."""
        self._contexts.insert(0, context)
        return self

    def __enter__(self) -> FusedLaunch[Result]:
        if self._contexts:
            with ExitStack() as entered:
                for context in self._contexts:
                    entered.enter_context(context)
                self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def launch(self) -> None:
        """Launches the kernel, and with it the put of ``RemoteKeys``; raises what its status means."""
        status = self._raw(*self._args)
        if status:
            self._library.check(status, self._what)


class RemoteGrads(NamedTuple):
    """dq, dk, dv in the dtype of q, and for the tiles of keys to which other ranks will add, whose dk and dv are not
    written yet, the addresses of sums in float32: (num_summed, 128, Hk, D) and (num_summed, 128, Hk, Dv), dense, in
    memory that ``held`` holds. ``of_sink``, with a sink: what its gradient is made of."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dk_sums: int
    dv_sums: int
    held: torch.Tensor
    of_sink: tuple[torch.Tensor, torch.Tensor, torch.Tensor, str] | None = None  # sink, lse, delta, layout

    def dsink(self) -> torch.Tensor | None:
        """The gradient of the sink, to be asked for behind the launch, which writes delta."""
        return None if self.of_sink is None else sink_bwd_from_delta(*self.of_sink)


def remote_params(mask: RemoteMask, wire: torch.dtype, **fields: int | abi.SymmBuffer) -> bytes:
    """The bytes of ``magi_ffa_remote`` but the addresses of sums: ``wire`` is the dtype of remote gradients; ``fields``
    are the addresses and the rest."""
    code = abi.FP32 if wire == torch.float32 else DTYPES[wire]
    sizes = {"local_keys": mask.local_keys, "base": mask.base, "rows": mask.rows, "num_signals": mask.num_signals}
    params = bytes(abi.FfaRemote(version=abi.ABI_VERSION, wire_dtype=code, **sizes, **fields))
    return params[: abi.FFA_REMOTE_PREFIX_BYTES]


_HAS_UNSEEN = abi.TileSegment.has_unseen.offset // 4


def _seen(slices: np.ndarray, num_keys: int) -> np.ndarray:
    """Which of the first keys some query of the slices sees, bool. Queries of one slice see all its keys together, but
    for those of slices with more keys or queries than they can use."""
    edges = np.zeros(num_keys + 1, dtype=np.int64)
    for q0, q1, k0, k1, kind in slices.tolist():
        if q1 <= q0 or k1 <= k0 or (kind == 3 and q1 - q0 > k1 - k0):
            continue
        k0, k1 = min(k0, num_keys), min(k1, num_keys)
        edges[k0] += 1
        edges[k1] -= 1
    return np.cumsum(edges[:-1]) > 0
