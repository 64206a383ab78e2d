# SPDX-License-Identifier: Apache-2.0
"""``Transport`` over a torch.distributed process group (gloo or NCCL).

On CPU tensors a wait lasts at most ``timeout_s`` and ends early with ``PeerFailureError`` when another rank
fails (see ``failure.py``). On CUDA tensors a wait orders the stream, the host runs on, and the time limit is
the one of NCCL's own watchdog.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from magi_attention.comm.transport.base import (
    DoneWork,
    PostWork,
    Rows,
    SingleTransport,
    Transport,
    TransportBase,
    Work,
    as_bytes,
    check_all_to_all,
    check_reduce_op,
)
from magi_attention.comm.transport.consistency import ConsistencyCheck, KnownUses, Use, agree_by_messages
from magi_attention.comm.transport.failure import ROLL_CALL_S, FailureBoard, describe_error
from magi_attention.comm.transport.host_work import HostWork
from magi_attention.comm.transport.process_groups import (
    DESTROYED,
    at_destruction,
    attached,
    check_alive,
    check_group,
    is_destroyed,
    timeout_of,
)
from magi_attention.comm.transport.waits import Awaited
from magi_attention.errors import ContractError, MagiError, PeerFailureError, UnsupportedError

_log = logging.getLogger("magi_attention.comm")

_WIRE_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    }
)
_SMALL_INTS = frozenset({torch.int16, torch.uint16})


class TorchTransport(TransportBase):
    """``group`` is a process group of which this process is a member; None is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float | None = None):
        group = dist.group.WORLD if group is None else group
        check_group(group)
        # why weak: a script keeps its plans to its end, and gloo's threads end with the last reference to their group;
        # a thread that drops a tensor after Python began to end aborts the process
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._timeout_s = None if timeout_s is None else float(timeout_s)
        self._board = _board_of(group, self.rank, self.ranks) if self.size > 1 else None
        self._check: ConsistencyCheck | None = attached(group)["check"] if self._board is not None else None
        self._known = KnownUses() if self._check is None else self._check.known
        self.progress = None if self._board is None else self._board.progress
        self._watchers = attached(group).setdefault("watchers", [])
        self._backends: dict[str, str] = {}
        self._a2a = dist.AllToAllOptions()
        self._a2a.asyncOp = True

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """The longest wait, in seconds; by default the timeout of ``init_process_group`` or ``new_group``."""
        return timeout_of(self.group) if self._timeout_s is None else self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = float(seconds)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which torch.distributed holds until it is destroyed; ``ContractError`` after that."""
        group = self._group()
        if group is None:
            raise ContractError(DESTROYED)
        return group

    # -- group collectives --------------------------------------------------------------------------------
    def all_to_all_v(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Rows, input_splits: Rows, async_op: bool = False
    ) -> Work:
        output, input = output.detach(), input.detach()
        check_all_to_all(output, input, output_splits, input_splits, self.size)
        if self.size == 1:
            output.copy_(input)
            return DoneWork()
        if input.numel() == 0 and output.numel() == 0 and 0 in input.shape[1:]:
            return DoneWork()
        backend = self._begin(input.device)
        send, place = self._stage(input.contiguous(), backend), self._stage(output, backend, is_output=True)
        wire_in, wire_out = _wire_view(send), _wire_view(place)
        # why not dist.all_to_all_single: it looks the group up again, which costs more than the operation
        work = self.group.alltoall_base(wire_out, wire_in, list(output_splits), list(input_splits), self._a2a)
        done = self._work(work, "all_to_all_v", send, keep=(wire_in, wire_out))
        if place is not output:
            done = PostWork(done, lambda: output.copy_(place))
        if not async_op:
            done.wait()
        return done

    def all_gather_v(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        x = x.detach()
        if len(sizes) != self.size or x.shape[0] != sizes[self.rank]:
            raise ContractError(
                f"Sizes {list(sizes)} must have {self.size} entries, and entry {self.rank} must be "
                f"{x.shape[0]}, the rows of this rank."
            )
        if self.size == 1:
            return x.clone()
        backend = self._begin(x.device)
        most = max(sizes)
        send = self._stage(x.contiguous(), backend)
        if most != send.shape[0]:  # why padded: gloo gathers equal sizes only, one call beats `size` calls
            padded = send.new_zeros((most, *send.shape[1:]))
            padded[: send.shape[0]] = send
            send = padded
        gathered = send.new_empty((self.size * most, *send.shape[1:]))
        if gathered.numel():
            wire_in, wire_out = _wire_view(send), _wire_view(gathered)
            # the same call under the name that newer torch prefers
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = gather(wire_out, wire_in, group=self.group, async_op=True)
            self._work(work, "all_gather_v", send, keep=(wire_in, wire_out)).wait()
        if any(n != most for n in sizes):
            gathered = torch.cat([gathered[r * most : r * most + n] for r, n in enumerate(sizes)])
        return gathered.to(x.device)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        check_reduce_op(op)
        tensor = tensor.detach()
        if self.size == 1 or tensor.numel() == 0:
            return DoneWork()
        backend = self._begin(tensor.device)
        if op == "avg" and not tensor.is_floating_point():
            raise ContractError(f"The average of {tensor.dtype} is not defined here; reduce a float tensor.")
        buffer = self._stage(tensor, backend, is_output=True)
        if buffer is not tensor:
            buffer.copy_(tensor)
        wire = buffer.int() if buffer.dtype in _SMALL_INTS else buffer
        kind = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}.get(op, dist.ReduceOp.MIN)
        work = dist.all_reduce(wire, kind, group=self.group, async_op=True)

        def finish() -> None:
            if op == "avg":
                wire.div_(self.size)
            if wire is not tensor:
                tensor.copy_(wire)

        done: Work = PostWork(self._work(work, "all_reduce", wire, keep=(wire,)), finish)
        if not async_op:
            done.wait()
        return done

    def all_gather_object(self, obj: object) -> list:
        if self.size == 1:
            return [obj]
        device = self.object_device()
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)
        sizes = self.all_gather_v(torch.tensor([data.numel()], device=device), [1] * self.size).tolist()
        parts = self.all_gather_v(data, sizes).cpu().split(sizes)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def barrier(self) -> None:
        """Blocks the host until all ranks are here."""
        if self.size > 1:
            token = torch.zeros(1, dtype=torch.int32, device=self.object_device())
            # why not dist.barrier: on gloo it raises for ever after one failed operation
            self.all_reduce(token)
            token.item()

    def meet(self, stage: str) -> None:
        """Blocks the host until all ranks are here in ``stage``; speaks through the store, so no GPU has to answer.

        Raises:
            PeerFailureError: names ranks that did not come within ``timeout_s``, or that failed.
        """
        check_alive(self.group)
        self._resume()
        if self._board is not None:
            self._ask_store(partial(self._board.meet, stage, self.timeout_s))

    def knows(self, use: str) -> bool:
        # after a failure all ranks meet first, and then compare anew
        return self._board is None or (use in self._known and not self._board.is_down)

    def agree(self, use: Use, x: torch.Tensor, seed: str = "", is_checked: bool = False) -> None:
        """It speaks through the store for tensors on a GPU, so no GPU has to answer, unless ``is_checked``."""
        check = self._check
        if check is None:
            return
        if is_checked or self._meets_for(x):
            agree_by_messages(self, self._known, use, seed)
        elif self.knows(use.name):
            if not torch.cuda.is_current_stream_capturing():
                check.follow(use)
        else:
            for watch in self._watchers:
                watch(use.stage)
            self._resume()
            self._ask_store(partial(check.compare, use, self.timeout_s))

    def _meets_for(self, x: object) -> bool:
        device = x.device if isinstance(x, torch.Tensor) else self.object_device()
        return device.type == "cpu"

    def gather_tokens(self, token: int) -> list[int]:
        mine = torch.tensor([token], device=self.object_device())
        return self.all_gather_v(mine, [1] * self.size).tolist()

    def blame(self, awaited: Awaited, stage: str) -> tuple[list[int], str]:
        """Asks the store for ``timeout_s`` at most; less if a rank at the end of a chain has failed or ended."""
        if self._board is None:
            return awaited()[:1], ""
        try:
            return self._board.follow(awaited, stage, self.timeout_s)
        except (OSError, RuntimeError):
            return awaited()[:1], (
                " The store of this group is gone, too, so nobody can say whether that rank waits itself; the process "
                "that holds the store may have been the first to fail."
            )

    def suspect(self, awaited: int, call: str) -> tuple[int, str]:
        """Who is to blame when ``awaited`` did not come to ``call``: that rank, or one that is gone, for which it may
        have waited. And what is known of both: sentences, each beginning with a space."""
        if self._board is None:
            return awaited, ""
        try:
            gone = self._board.gone()
        except (OSError, RuntimeError):
            return awaited, ""  # why: the store is gone, and with it what it knew
        suspect = awaited if awaited in gone or not gone else gone[0]
        return suspect, self._board.about(dict.fromkeys((awaited, suspect)), call)

    def give_up(self, text: str) -> None:
        """Tells all ranks that no message can pass any more, and why."""
        if self._board is not None:
            self._board.lost = text
            self._board.report(text, "lost")

    # -- what lives as long as the group ------------------------------------------------------------------
    @property
    def kept(self) -> dict[Any, Any]:  # type: ignore[override]
        return attached(self.group)

    @property
    def store(self) -> Any:
        """Where ranks of this group leave words for one another, below keys of its own."""
        assert self._board is not None
        return self._board.private_store

    def reference(self) -> Callable[[], TransportBase | None]:
        known, timeout_s = weakref.ref(self.group), self._timeout_s

        def get() -> TransportBase | None:
            group = known()
            return None if group is None or is_destroyed(group) else TorchTransport(group, timeout_s)

        return get

    def at_end(self, action: Callable[[], None]) -> None:
        """Within ``destroy_process_group``, after all ranks have met there. If one does not come in 10 s, or was lost
        before, nothing is called and a line in the log says so."""
        board, name = self._board, "this process group"

        def run() -> None:
            try:
                if board is not None:
                    board.meet("the end of its process group", ROLL_CALL_S)
            except (OSError, RuntimeError) as exc:
                _log.warning("What the ranks of %s shared goes with their processes: %s", name, exc)
                return
            action()

        at_destruction(self.group, run)

    # -- devices ------------------------------------------------------------------------------------------
    def object_device(self) -> torch.device:
        backends = str(dist.get_backend(self.group))
        if "gloo" in backends or "mpi" in backends:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _backend(self, device: torch.device) -> str:
        if device.type not in self._backends:
            try:
                self._backends[device.type] = self.group._get_backend(device).name()
            except RuntimeError as exc:
                raise UnsupportedError(
                    f"Backend {dist.get_backend(self.group)} of this process group cannot move {device.type} "
                    "tensors; make the group with backend 'cpu:gloo,cuda:nccl'."
                ) from exc
            known = attached(self.group)
            if device.type != "cpu" and self._backends[device.type] == "gloo" and not known.get("warned"):
                known["warned"] = True
                _log.warning("%s tensors travel through host memory because the group is gloo.", device.type)
        return self._backends[device.type]

    def _stage(self, x: torch.Tensor, backend: str, is_output: bool = False) -> torch.Tensor:
        """``x`` itself if the backend can use its memory, else a buffer (with the content of an input)."""
        if backend == "gloo" and x.device.type != "cpu":
            return torch.empty(x.shape, dtype=x.dtype, device="cpu") if is_output else x.cpu()
        return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)

    # -- waiting and failing ------------------------------------------------------------------------------
    def _begin(self, device: torch.device) -> str:
        check_alive(self.group)
        backend = self._backend(device)
        for watch in self._watchers:
            watch("a collective")
        self._resume()
        if self.progress is not None:
            self.progress.count()
        return backend

    def _resume(self) -> None:
        if self._board is not None and self._board.is_down:
            self._ask_store(partial(self._board.resume, self.timeout_s))

    @staticmethod
    def _ask_store(action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RuntimeError) as exc:
            if isinstance(exc, MagiError):
                raise
            raise PeerFailureError(f"The store of this process group is gone; make a new one. {exc}") from exc

    def _work(self, work: dist.Work, what: str, x: torch.Tensor, keep: tuple) -> Work:
        if x.device.type != "cpu" or self._board is None:
            return work
        return HostWork(work, what, self._board, lambda: self.timeout_s, keep)

    def check_alive(self) -> None:
        check_alive(self.group)

    def report_failure(self, exc: BaseException, stage: str) -> None:
        group = self._group()
        if self._board is not None and group is not None and not is_destroyed(group):
            self._board.report(describe_error(exc, stage))


def as_transport(group: dist.ProcessGroup | Transport | None = None, timeout_s: float | None = None) -> Transport:
    """``group`` as a ``Transport``: one is returned as it is; a process group is wrapped; None is the default
    group, or a single rank if torch.distributed is not initialised. A group of one rank never
    communicates."""
    if isinstance(group, (TransportBase, Transport)):  # the protocol last, because to ask it is slow
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SingleTransport()
    group = dist.group.WORLD if group is None else group
    check_group(group)
    check_alive(group)
    if dist.get_world_size(group) == 1:
        return SingleTransport(dist.get_process_group_ranks(group)[0])
    return TorchTransport(group, timeout_s)


def _board_of(group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...]) -> FailureBoard:
    known = attached(group)
    if "board" not in known:
        store = dist.distributed_c10d._get_process_group_store(group)
        ref = weakref.ref(group)

        def position() -> int:
            group = ref()
            return 0 if group is None else group._get_sequence_number_for_group()  # type: ignore[attr-defined]

        board = known["board"] = FailureBoard(store, rank, ranks, position)
        known["check"] = ConsistencyCheck(board, rank)
    return known["board"]


def _wire_view(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in _WIRE_DTYPES else as_bytes(x)
