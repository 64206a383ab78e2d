# SPDX-License-Identifier: Apache-2.0
"""What an exchange over nodes needs of a network: symmetric memory, and five launches that move rows in it.

``NvshmemVerbs`` has NVSHMEM below, ``GinVerbs`` NCCL's device API. Anything else that has the four verbs of
``docs/design/two_levels.md`` can take their place: ``FACTORY`` is where a group finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from magi_attention.comm.transport.base import Transport, TransportBase
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.native.comm import abi as comm_abi
from magi_attention.native.comm.gin import Gin
from magi_attention.native.comm.nvshmem import Nvshmem

FACTORY = "factory of verbs"  # the name in ``Transport.kept``


class Verbs(Protocol):
    """Launches on the stream of their parameters, and the memory that they work in."""

    name: str
    network: int | None
    """What launches need to know of the memory that is out: an address on the device, or None."""

    def alloc(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory at the same offset on all ranks, (num_bytes,) uint8; collective."""
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Gives memory of ``alloc`` back when no launch uses it any more; collective."""
        ...

    def leave(self) -> None:
        """Ends what the ranks share; collective, after the last ``free``."""
        ...

    def put(self, params: comm_abi.CommPutParams) -> None: ...

    def relay(self, params: comm_abi.CommRelayParams) -> None: ...

    def wait(self, params: comm_abi.CommWaitParams) -> None: ...

    def sum(self, params: comm_abi.CommSumParams) -> None: ...

    def end(self, params: comm_abi.CommEndParams) -> None: ...


class VerbsFactory(Protocol):
    """Makes the verbs of a group. ``name`` is for people; ``version`` must be the same on all ranks, and is known when
    ``why_not`` has found nothing."""

    name: str
    version: str

    def why_not(self, transport: Transport, device: torch.device) -> str | None:
        """What this rank lacks, in words that follow "On rank 1"; None if nothing. Does not communicate."""
        ...

    def join(self, transport: Transport, device: torch.device) -> Verbs:
        """Joins the ranks of the group; collective."""
        ...


class _Address:
    """Device memory at an address, as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        data = (address, False)  # may be written
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 3}


def _memory_at(address: int, num_bytes: int) -> torch.Tensor:
    memory = torch.as_tensor(_Address(address, num_bytes), device="cuda")
    if memory.data_ptr() != address:
        raise ContractError(
            f"Symmetric memory lies on another device than cuda:{torch.cuda.current_device()}; choose the device "
            "by torch.cuda.set_device before joining."
        )
    return memory


class _LibraryVerbs:
    """The verbs over a library whose ranks have joined."""

    def __init__(self, library: Nvshmem | Gin) -> None:
        self.put: Callable[[comm_abi.CommPutParams], None] = library.put
        self.relay: Callable[[comm_abi.CommRelayParams], None] = library.relay
        self.wait: Callable[[comm_abi.CommWaitParams], None] = library.wait
        self.sum: Callable[[comm_abi.CommSumParams], None] = library.sum
        self.end: Callable[[comm_abi.CommEndParams], None] = library.end
        self.leave: Callable[[], None] = library.leave
        self._alloc: Callable[[int], int] = library.alloc

    def alloc(self, num_bytes: int) -> torch.Tensor:
        return _memory_at(self._alloc(num_bytes), num_bytes)


class _Joined:
    """NVSHMEM while the ranks of one group are in it: for the exchanges of all nodes that the group is cut into."""

    KEY = "joined NVSHMEM"  # in ``TransportBase.kept``

    def __init__(self, library: Nvshmem, kept: dict[Any, Any]) -> None:
        self.library, self.users, self._kept = library, 0, kept

    def leave(self) -> None:
        """By one user; the last one leaves NVSHMEM."""
        self.users -= 1
        if self.users == 0:
            self._kept.pop(self.KEY, None)
            self.library.leave()


class NvshmemVerbs(_LibraryVerbs):
    """The verbs over NVSHMEM."""

    name = "NVSHMEM"
    network: int | None = None

    def __init__(self, joined: _Joined) -> None:
        super().__init__(joined.library)
        joined.users += 1
        self.library, self.leave = joined.library, joined.leave

    def free(self, memory: torch.Tensor) -> None:
        self.library.free(memory.data_ptr())


class _Factory:
    """Loads the library of a network of GPUs."""

    name: ClassVar[str]
    version = ""
    _library: Any = None

    def _why_not_device(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return f"tensors are on {device.type}, and {self.name} moves those of GPUs"

    def _why_not_library(self, load: Callable[[], Nvshmem | Gin]) -> str | None:
        try:
            self._library = load()
        except UnsupportedError as error:
            return f"{self.name} cannot be used: {error}"
        self.version = _versions(self._library.built, self._library.loaded)
        return None


class NvshmemFactory(_Factory):
    """NVSHMEM for the GPUs of a group. A process can be in one such group at a time, which is NVSHMEM's own limit."""

    name = "NVSHMEM"

    def why_not(self, transport: Transport, device: torch.device) -> str | None:
        if reason := self._why_not_device(device) or self._why_not_library(Nvshmem):
            return reason
        if self._library.has_joined and _Joined.KEY not in _kept(transport):
            return "NVSHMEM has joined another group already, and a process can be in one"
        if not hasattr(transport, "store"):
            return "the group has no store by which ranks could pass the id of NVSHMEM"
        return None

    def join(self, transport: Transport, device: torch.device) -> NvshmemVerbs:
        assert self._library is not None
        kept = _kept(transport)
        if _Joined.KEY not in kept:
            self._library.join(transport.store, transport.rank, transport.size)  # type: ignore[attr-defined]
            kept[_Joined.KEY] = _Joined(self._library, kept)
        return NvshmemVerbs(kept[_Joined.KEY])


class GinVerbs(_LibraryVerbs):
    """The verbs over a communicator of NCCL. No GPU has run them."""

    name = "GIN"

    def __init__(self, library: Gin) -> None:
        super().__init__(library)
        self.library = library

    @property
    def network(self) -> int | None:
        return self.library.network

    def free(self, memory: torch.Tensor) -> None:
        self.library.free()


class GinFactory(_Factory):
    """NCCL's device API over the communicator that torch has for a group of GPUs."""

    name = "GIN"

    def why_not(self, transport: Transport, device: torch.device) -> str | None:
        if reason := self._why_not_device(device):
            return reason
        if not hasattr(_backend(transport, device), "_comm_ptr"):
            return "the group has no communicator of NCCL for these tensors"
        return self._why_not_library(Gin)

    def join(self, transport: Transport, device: torch.device) -> GinVerbs:
        assert self._library is not None
        transport.all_reduce(torch.zeros(1, device=device)).wait()  # torch makes communicators when they are used first
        self._library.join(_backend(transport, device)._comm_ptr())
        return GinVerbs(self._library)


def _kept(transport: Transport) -> dict[Any, Any]:
    """What the group keeps; nothing where ranks do not vote."""
    return transport.kept if isinstance(transport, TransportBase) else {}


def _versions(built: tuple[int, ...], loaded: tuple[int, ...]) -> str:
    return f"{'.'.join(map(str, loaded))} (compiled with {'.'.join(map(str, built))})"


def _backend(transport: Transport, device: torch.device) -> Any:
    """What moves tensors of the device in torch's group; None without one."""
    group = getattr(transport, "group", None)
    try:
        return None if group is None else group._get_backend(device)
    except RuntimeError:
        return None
