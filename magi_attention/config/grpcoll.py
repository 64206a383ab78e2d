# SPDX-License-Identifier: Apache-2.0
"""``GrpCollConfig``: resources of the native group collectives, their defaults and least buffer sizes."""

from __future__ import annotations

from dataclasses import dataclass

from magi_attention.config.checks import set_ints
from magi_attention.errors import ContractError


@dataclass(frozen=True)
class GrpCollKernelConfig:
    """The five numbers that a native group-collective kernel is launched with."""

    num_sms: int
    nvl_chunk_size: int
    nvl_buffer_size: int
    rdma_chunk_size: int
    rdma_buffer_size: int


# Measured defaults by number of ranks: num_sms, nvl chunk, nvl buffer, rdma chunk, rdma buffer.
_CAST_DEFAULTS: dict[int, tuple[int, int, int, int, int]] = {
    2: (24, 24, 256, 6, 128),
    4: (24, 6, 256, 6, 128),
    8: (24, 6, 256, 6, 128),
    16: (24, 36, 288, 20, 128),
    24: (24, 8, 288, 32, 128),
    32: (24, 32, 288, 32, 128),
    64: (24, 20, 288, 28, 128),
    128: (24, 20, 560, 32, 128),
    144: (24, 32, 720, 12, 128),
    160: (24, 28, 720, 12, 128),
}
_REDUCE_DEFAULTS: dict[int, tuple[int, int, int, int, int]] = {
    2: (24, 10, 256, 6, 128),
    4: (24, 9, 256, 6, 128),
    8: (24, 4, 256, 6, 128),
    16: (24, 4, 288, 12, 128),
    24: (24, 1, 288, 8, 128),
    32: (24, 1, 288, 8, 128),
    64: (24, 1, 288, 20, 128),
    128: (24, 1, 560, 12, 128),
    144: (24, 2, 720, 8, 128),
    160: (24, 2, 720, 8, 128),
}


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class GrpCollConfig:
    """Resources of the native group collectives; other implementations ignore it.

    Args:
        num_sms: SMs used, even.
        nvl_chunk_size, rdma_chunk_size: tokens sent at a time over NVLink and over the network.
        nvl_buffer_size, rdma_buffer_size: tokens of queue per channel and peer.
        num_nvl_bytes, num_rdma_bytes: sizes of the registered buffers.
    """

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0

    def __post_init__(self) -> None:
        queues = ("nvl_chunk_size", "nvl_buffer_size", "rdma_chunk_size", "rdma_buffer_size")
        set_ints(self, "num_sms", *queues, at_least=1)
        set_ints(self, "num_nvl_bytes", "num_rdma_bytes", at_least=0)
        _check_even_sms(self.num_sms)

    def to_kernel_config(self) -> GrpCollKernelConfig:
        return GrpCollKernelConfig(
            self.num_sms,
            self.nvl_chunk_size,
            self.nvl_buffer_size,
            self.rdma_chunk_size,
            self.rdma_buffer_size,
        )

    def to_buffer_args(self) -> dict[str, int | bool]:
        return {
            "num_nvl_bytes": self.num_nvl_bytes,
            "num_rdma_bytes": self.num_rdma_bytes,
            "num_qps_per_rank": self.num_sms if self.num_rdma_bytes > 0 else 1,
            "low_latency_mode": False,
            "explicitly_destroy": True,
        }

    @staticmethod
    def get_default_group_cast_config(num_ranks: int) -> GrpCollConfig:
        """The measured default for a group cast over ``num_ranks`` ranks."""
        return _default_for(num_ranks, _CAST_DEFAULTS)

    @staticmethod
    def get_default_group_reduce_config(num_ranks: int) -> GrpCollConfig:
        """The measured default for a group reduce over ``num_ranks`` ranks."""
        return _default_for(num_ranks, _REDUCE_DEFAULTS)

    @staticmethod
    def get_min_num_bytes_intranode(
        num_sms: int,
        num_ranks: int,
        hidden_size: int,
        nvl_buffer_size: int,
        dtype,
        transfer_lse: bool = False,
        num_heads: int | None = None,
        num_groups: int = 1,
        alignment: int = 128,
    ) -> int:
        """Least ``num_nvl_bytes`` within one node.

        With C = num_sms / 2 channels, R ranks, B = nvl_buffer_size, H = hidden_size elements of ``esz``
        bytes, nh heads (0 without lse) and G tensors:
        ``4 R^2 + 16 C R + C R B H esz G + 4 C R B + 4 C R B nh + 16 G``, rounded up to ``alignment``.
        ``dtype`` is anything with ``itemsize`` (a torch or numpy dtype).
        """
        heads = _checked_heads(num_sms, hidden_size, transfer_lse, num_heads)
        slots = num_sms // 2 * num_ranks
        tokens = slots * nvl_buffer_size
        size = 4 * num_ranks**2 + 16 * slots + 16 * num_groups
        size += tokens * (hidden_size * dtype.itemsize * num_groups + 4 + 4 * heads)
        return _align_up(size, alignment)

    @staticmethod
    def get_min_num_bytes_internode(
        num_sms: int,
        num_rdma_ranks: int,
        num_nvl_ranks: int,
        hidden_size: int,
        rdma_buffer_size: int,
        nvl_buffer_size: int,
        dtype,
        transfer_lse: bool = False,
        num_heads: int | None = None,
        num_groups: int = 1,
        rdma_decoulped: bool = True,  # spelled so in the published API
        alignment: int = 128,
    ) -> tuple[int, int]:
        """Least ``(num_rdma_bytes, num_nvl_bytes)`` across nodes, each rounded up to ``alignment``.

        Bytes per token: ``t = align16(H esz + 4 nh + 8) + (G - 1) H esz``. Then with D = 2 if decoupled
        else 1, Rr network ranks and Rn NVLink ranks: ``rdma = D C Rr Brdma t + 4 D C Rr (2 Rn + 4)`` and
        ``nvl = C Rn Bnvl t + 4 C Rn (2 Rr + 2)``.
        """
        heads = _checked_heads(num_sms, hidden_size, transfer_lse, num_heads)
        row = hidden_size * dtype.itemsize
        token = _align_up(row + 4 * heads + 8, 16) + (num_groups - 1) * row
        rdma_slots = (2 if rdma_decoulped else 1) * (num_sms // 2) * num_rdma_ranks
        nvl_slots = num_sms // 2 * num_nvl_ranks
        rdma = rdma_slots * (rdma_buffer_size * token + 4 * (2 * num_nvl_ranks + 4))
        nvl = nvl_slots * (nvl_buffer_size * token + 4 * (2 * num_rdma_ranks + 2))
        return _align_up(rdma, alignment), _align_up(nvl, alignment)


def _check_even_sms(num_sms: int) -> None:
    if num_sms % 2:
        raise ContractError(f"num_sms is {num_sms}; native collectives pair SMs, so give an even number.")


def _checked_heads(num_sms: int, hidden_size: int, transfer_lse: bool, num_heads: int | None) -> int:
    _check_even_sms(num_sms)
    if not transfer_lse:
        return 0
    if num_heads is None or num_heads <= 0 or hidden_size % num_heads:
        raise ContractError(
            f"hidden_size {hidden_size} with num_heads {num_heads}: sending lse needs num_heads, "
            "and hidden_size must be a multiple of it."
        )
    return num_heads


def _default_for(num_ranks: int, table: dict[int, tuple[int, int, int, int, int]]) -> GrpCollConfig:
    try:
        return GrpCollConfig(*table[num_ranks])
    except KeyError:
        known = ", ".join(map(str, table))
        raise ContractError(
            f"There is no measured default for {num_ranks} ranks, only for {known}; make a GrpCollConfig."
        ) from None
