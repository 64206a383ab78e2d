# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers: memory of every rank that all ranks of one NVLink domain can address.

``csrc/include/magi/symm.h`` has the protocol. The memory is torch's symmetric memory; a buffer grows when a plan
needs more, which is collective, and never shrinks.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.process_groups import attached
from magi_attention.comm.transport.streams import OrderedStream, OrderedStreams
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.env import build
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.native import abi
from magi_attention.native.comm.symm import Put, RecvReduce, Reduce, Unpack, control_bytes
from magi_attention.native.families import family_of
from magi_attention.native.stream_order import StreamOrder

_GRAIN = 2**20
# By which torch lets ranks share memory whose devices have the same number; all that it leaves out then is multicast.
_MAY_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_log = logging.getLogger("magi_attention.comm")
_CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}


@dataclass(frozen=True)
class SymmBuffer:
    """One buffer as this rank sees it. ``memory`` is uint8; ``addresses`` int64 ``(world,)`` on the device."""

    memory: torch.Tensor
    handle: object
    addresses: torch.Tensor
    data_bytes: int

    @property
    def own(self) -> int:
        return self.memory.data_ptr()

    @property
    def struct(self) -> abi.SymmBuffer:
        return abi.SymmBuffer(self.own, self.addresses.data_ptr())


class SymmGroup:
    """The buffers of one process group, by name, and the word in which a kernel says for whom it waited in vain."""

    def __init__(self, transport: TorchTransport, device: torch.device) -> None:
        # why weak: the buffers go with the group, and a group outlives the transports that speak through it
        self._group = weakref.ref(transport.group)
        self.rank, self.world, self.device = transport.rank, transport.size, device
        self.control_bytes = control_bytes(self.world)
        self.timeout_ms = min(int(transport.timeout_s * 1000), 2**31 - 1)
        self._buffers: dict[str, SymmBuffer] = {}
        self._ordered_streams = OrderedStreams(device)
        self._fused_launches = StreamOrder(current=partial(torch.cuda.current_stream, device))
        # Host memory that kernels write: what they find out must be known without waiting for them.
        self._failed_peer = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._failed_peer_view = self._failed_peer.numpy()
        self.failed_peer_address = self._failed_peer.data_ptr()
        self.rank_of_signal: dict[int, int] = {}  # of the launch before
        self._stage, self._has_told = "the first call", False
        transport.watch(self)

    @property
    def has_failed(self) -> bool:
        """Has a kernel given up waiting?"""
        return bool(self._failed_peer_view[0])

    @property
    def is_capturing(self) -> bool:
        """Is the current stream being captured in a CUDA graph?"""
        return torch.cuda.is_current_stream_capturing()

    def check(self, stage: str) -> None:
        """Raises ``PeerFailureError`` if a kernel gave up waiting. The group is broken then: all later calls raise
        too."""
        found = int(self._failed_peer_view[0])
        if not found:
            self._stage = stage
            return
        peer = found - 1
        if peer >= abi.SYMM_FAILED_SIGNAL:
            peer = self.rank_of_signal.get(peer - abi.SYMM_FAILED_SIGNAL, peer)
        group = self._group()
        suspect, about = (peer, "") if group is None else TorchTransport(group).suspect(peer, self._stage)
        text = (
            f"Rank {peer} did not deliver within {self.timeout_ms / 1000:g} s in {self._stage} or a call before it, "
            f"as is found in {stage}; results since then are void.{about} Look at the log of rank {suspect}; make a "
            "new process group to go on."
        )
        if group is not None and not self._has_told:
            self._has_told = True
            TorchTransport(group).give_up(text)
        raise PeerFailureError(text)

    def buffer(self, name: str, data_bytes: int) -> SymmBuffer:
        """The buffer ``name`` with room for ``data_bytes``, the same on all ranks; collective where it must grow."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.data_bytes < data_bytes:
            # One that grows does so by a quarter at least: all ranks wait for it, and who used the old one keeps it.
            needed = data_bytes if buffer is None else max(data_bytes, buffer.data_bytes + buffer.data_bytes // 4)
            buffer = self._buffers[name] = self._make(name, -(-needed // _GRAIN) * _GRAIN)
        return buffer

    def meet(self, stage: str) -> dist.ProcessGroup:
        """Returns the group when all its ranks are here: messages to a rank that is gone would never end."""
        group = self._group()
        if group is None:
            raise ContractError("The process group of these buffers was destroyed; go on with one that exists.")
        TorchTransport(group, self.timeout_ms / 1000).meet(stage)
        return group

    def holds(self, buffer: SymmBuffer) -> bool:
        """Is this still one of the buffers, and not one that has grown since?"""
        for known in self._buffers.values():  # no generator: asked in every layer
            if known is buffer:
                return True
        return False

    def ordered(self, is_beside: bool) -> AbstractContextManager[OrderedStream]:
        """Group collectives use one buffer each, so they follow one another, on whatever stream they are."""
        return self._ordered_streams.next(is_beside)

    def enter(self, stream: int) -> int:
        """Puts a call of attention in one launch behind the last one, as all use the same buffers, in the same order on
        all ranks. Returns the event that the call has to record behind its launches, or 0."""
        return self._fused_launches.enter(stream, self.is_capturing)

    def exit_early(self, event: int) -> None:
        """What a call has launched before it failed is to be followed, too."""
        if event:
            self._fused_launches.exit()

    # -- launches, prepared: addresses that change from call to call are given to them --------------------
    def put(self, buffer: SymmBuffer, also_free: SymmBuffer | None = None, **fields) -> Put:
        """Rows to other ranks; ``fields`` are the rest of ``magi_symm_put_params``."""
        if also_free is not None:
            fields["also_free"] = also_free.struct
        return Put(**self._common, buffer=buffer.struct, **fields)

    def unpack(self, buffer: SymmBuffer, **fields) -> Unpack:
        """What others put into ``buffer``, copied out as it arrives; ends its use. Right behind the put."""
        return Unpack(**self._common, buffer=buffer.struct, **fields)

    def recv_reduce(
        self, buffer: SymmBuffer, wire: torch.dtype, out: torch.dtype, base: torch.dtype, **fields
    ) -> RecvReduce:
        """The sum of a base and what others put into ``buffer``, as it arrives; ends its use. Right behind the put."""
        return RecvReduce(**self._common, **_codes(wire, out, base), buffer=buffer.struct, **fields)

    def reduce(
        self, buffer: SymmBuffer, put_buffer: SymmBuffer, wire: torch.dtype, out: torch.dtype, **fields
    ) -> Reduce:
        """The sum of what kernels of other ranks wrote into ``buffer``, which is there already, and a float32 base;
        ends the use of both buffers."""
        dtypes = _codes(wire, out, torch.float32)
        return Reduce(**self._common, **dtypes, buffer=buffer.struct, put_buffer=put_buffer.struct, **fields)

    @property
    def _common(self) -> dict[str, int]:
        return {
            "rank": self.rank, "world": self.world, "timeout_ms": self.timeout_ms,
            "failed_peer": self.failed_peer_address,
        }  # fmt: skip

    def _make(self, name: str, data_bytes: int) -> SymmBuffer:
        if self.is_capturing:
            raise ContractError(
                f"The memory that ranks share for {name} must grow, which cannot be done while a CUDA graph is "
                "captured; run the call once before the capture."
            )
        from torch.distributed import _symmetric_memory as symmetric

        stage = f"making room for {name}"
        torch.cuda.synchronize(self.device)  # kernels that still write the old one, on this rank ...
        self.check(stage)
        group = self.meet(stage)  # ... and on the others
        memory = symmetric.empty(self.control_bytes + data_bytes, dtype=torch.uint8, device=self.device)
        with _may_overlap(_overlap(_views(TorchTransport(group))) is not None):
            handle = symmetric.rendezvous(memory, group.group_name)
        memory.zero_()
        addresses = torch.tensor([int(p) for p in handle.buffer_ptrs], dtype=torch.int64, device=self.device)
        torch.cuda.synchronize(self.device)
        self.meet(stage)  # nobody writes before all control words are 0
        return SymmBuffer(memory, handle, addresses, data_bytes)


def _codes(wire: torch.dtype, out: torch.dtype, base: torch.dtype) -> dict[str, int]:
    return {"wire_dtype": _CODES[wire], "base_dtype": _CODES[base], "out_dtype": _CODES[out]}


def symm_group(transport: TorchTransport, device: torch.device) -> SymmGroup:
    """The buffers of the transport's group on this device, made once."""
    known = attached(transport.group)
    key = ("buffers", device.index)
    if key not in known:
        known[key] = SymmGroup(transport, device)
    return known[key]


@contextmanager
def _may_overlap(is_so: bool) -> Iterator[None]:
    """Devices of the same number are no error of torch's symmetric memory here."""
    before = os.environ.get(_MAY_OVERLAP)
    if is_so:
        os.environ[_MAY_OVERLAP] = "1"
    try:
        yield
    finally:
        if is_so and before is None:
            del os.environ[_MAY_OVERLAP]
        elif is_so and before is not None:
            os.environ[_MAY_OVERLAP] = before


@dataclass(frozen=True)
class View:
    """What a rank sees of its machine."""

    host: str
    device: int
    """Its GPU's number in this process."""
    uuid: str
    """What tells its GPU from all others, whatever is visible to whom."""
    missing: str | None = None
    """What it lacks, in words that follow "On rank 1"."""

    @classmethod
    def own(cls) -> View:
        if not torch.cuda.is_available():
            return cls(socket.gethostname(), -1, "", "there is no CUDA device")
        try:
            from torch.distributed import _symmetric_memory  # noqa: F401
        except ImportError as error:
            return cls(socket.gethostname(), -1, "", f"torch has no symmetric memory ({error})")
        boot = "/proc/sys/kernel/random/boot_id"
        host = open(boot).read().strip() if os.path.exists(boot) else socket.gethostname()
        device = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        major, minor = torch.cuda.get_device_capability(device)
        family = family_of((major, minor), build.is_portable_kernels())
        has_kernels = family is not None and not family.is_portable
        lack = f"the attention kernels for compute capability {major}.{minor} do not run beside exchanges over NVLink"
        return cls(host, device, uuid, None if has_kernels else lack)


def why_no_symm_buffers(transport: Transport, by_wish: bool = False) -> str | None:
    """None if all ranks of the group can address each other's memory, else a sentence; the same on all ranks.

    Ranks that share a GPU, and ranks of which each has a GPU number 0 of its own, use buffers only ``by_wish``: kernels
    of the former take turns of milliseconds on the GPU, which is good for tests alone, and of the latter it is not
    known whether their GPUs can address each other. Collective at the first call for a group.
    """
    if not isinstance(transport, TorchTransport):
        return "The group does not speak through torch.distributed."
    views, known = _views(transport), attached(transport.group)
    overlap = _overlap(views)
    if by_wish and overlap is not None and "said_overlap" not in known:
        known["said_overlap"] = True
        _log.warning("%s It is done all the same, as MAGI_ATTENTION_NATIVE_GRPCOLL=1 asks for it.", overlap)
    return _judge(views) or (None if by_wish else overlap)


def _views(transport: TorchTransport) -> list[View]:
    known = attached(transport.group)
    if "views" not in known:
        transport.meet("the first look at who shares memory")
        known["views"] = transport.all_gather_object(View.own())
    return known["views"]


def why_no_kernels_beside(transport: Transport) -> str | None:
    """None if the attention kernels of all ranks can run while rows travel, by whatever link, else a sentence; the same
    on all ranks. Collective at the first call for a group."""
    if not isinstance(transport, TorchTransport):
        return "The group does not speak through torch.distributed."
    return _missing(_views(transport))


def _missing(views: list[View]) -> str | None:
    for rank, view in enumerate(views):
        if view.missing:
            return f"On rank {rank} {view.missing}."
    return None


def _judge(views: list[View]) -> str | None:
    """What nobody's wish can change."""
    missing = _missing(views)
    if missing is not None:
        return missing
    hosts = {view.host for view in views}
    if len(hosts) > 1:
        return f"The ranks are on {len(hosts)} hosts."
    devices = [view.device for view in views]
    for a in devices:
        for b in devices:
            if a != b and a < torch.cuda.device_count() and b < torch.cuda.device_count():
                if not torch.cuda.can_device_access_peer(a, b):
                    return f"GPU {a} cannot address the memory of GPU {b}."
    return None


def _overlap(views: list[View]) -> str | None:
    """A sentence if some ranks have GPUs of the same number."""
    if len({view.uuid for view in views}) < len(views):
        return "Several ranks share a GPU, on which their kernels take turns of milliseconds."
    if len({view.device for view in views}) < len(views):
        return (
            "Several ranks call GPUs of their own by the same number, because each sees others; let all ranks see all "
            "GPUs (CUDA_VISIBLE_DEVICES, or RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1) and take one by "
            "torch.cuda.set_device."
        )
    return None
