# SPDX-License-Identifier: Apache-2.0
"""``MachineRates``: how fast a machine computes attention and moves rows; measured by `magi tune`, or assumed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from magi_attention.config.dispatch import LocalityDispatchAlg
from magi_attention.config.dist_attn import DistAttnConfig
from magi_attention.config.links import NVLINK_BYTES_PER_S, NVLINK_LATENCY_S
from magi_attention.config.overlap import OverlapConfig
from magi_attention.env import build as env
from magi_attention.env import general
from magi_attention.errors import ContractError
from magi_attention.version import __version__

# Floating-point operations for each allowed pair, query head and head dim: two products forward, five backward.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
# Values of a row of keys, for each kv head and head dim: k and v travel to the forward and again to the backward, and
# dk and dv back.
ROW_VALUES = 6
_MICRO = 1e6


@dataclass(frozen=True)
class KernelRate:
    """FLOP/s of a causal mask of ``tokens`` on one device: ``FORWARD_FLOPS`` and ``BACKWARD_FLOPS`` are counted for
    each allowed pair, query head and head dim."""

    heads_q: int
    heads_kv: int
    head_dim: int
    tokens: int
    forward: float
    backward: float


@dataclass(frozen=True)
class MachineRates:
    """Rates of one machine, or without arguments those assumed of H100 GPUs on NVLink.

    Args:
        device: name of the GPU, or CPU. ranks: processes that were measured, one for each device.
        version: of this package. dtype, element_bytes: what was measured.
        kernels: rates by shape; the assumed one is that of packed documents in benchmarks/results/ffa_forward_h100.json
            and ffa_backward_h100.json (varlen_causal, 32,768 tokens).
        link_bytes_per_s: what a rank receives while all ranks send; assumed: that of NVLink in ``config/links.py``.
        link_latency_s: of an exchange that moves next to nothing.
        is_measured: False for assumed rates.
    Raises:
        ContractError: no kernel, or a rate is not positive.
    """

    device: str = "NVIDIA H100"
    ranks: int = 8
    version: str = __version__
    dtype: str = "bfloat16"
    element_bytes: int = 2
    kernels: tuple[KernelRate, ...] = (KernelRate(64, 8, 128, 32_768, 728e12, 599e12),)
    link_bytes_per_s: float = NVLINK_BYTES_PER_S
    link_latency_s: float = NVLINK_LATENCY_S
    is_measured: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(self.kernels))
        rates = [x for kernel in self.kernels for x in (kernel.forward, kernel.backward)]
        if not rates or not min(*rates, self.link_bytes_per_s) > 0 or not self.link_latency_s >= 0:
            raise ContractError(
                f"Rates of {self.device} must be positive, and there must be one of a kernel at least; run `magi tune`."
            )

    # ---- what they say ------------------------------------------------------------------------------

    def kernel(self, heads_q: int, heads_kv: int, head_dim: int, tokens: float | None = None) -> KernelRate:
        """The rate of the shape that is most like this one: by head dim, then by query heads of a kv head, then by
        tokens, of which None stands for many."""

        def distance(rate: KernelRate) -> tuple[float, ...]:
            groups = rate.heads_q / rate.heads_kv, heads_q / heads_kv
            length = -rate.tokens if tokens is None else abs(log2(rate.tokens / max(tokens, 1)))
            return abs(log2(rate.head_dim / head_dim)), abs(log2(groups[0] / groups[1])), length

        return min(self.kernels, key=distance)

    def pair_seconds(
        self, heads_q: int, heads_kv: int, head_dim: int, tokens: float | None = None
    ) -> tuple[float, float]:
        """Seconds for an allowed pair, all heads: forward, backward."""
        rate, values = self.kernel(heads_q, heads_kv, head_dim, tokens), heads_q * head_dim
        return FORWARD_FLOPS * values / rate.forward, BACKWARD_FLOPS * values / rate.backward

    def bytes_seconds(self, num_bytes: float) -> float:
        """Seconds in which a rank receives so many bytes, without the latency."""
        return num_bytes / self.link_bytes_per_s

    def row_seconds(self, heads_kv: int, head_dim: int) -> float:
        """Seconds that a row of keys costs in one forward and backward."""
        return self.bytes_seconds(ROW_VALUES * heads_kv * head_dim * self.element_bytes)

    def config(self, config: DistAttnConfig | None, heads_q: int, heads_kv: int, head_dim: int) -> DistAttnConfig:
        """``config`` with what these rates decide: the factors of ``OverlapConfig`` (microseconds of a forward and
        backward) and ``LocalityDispatchAlg.row_cost``. ``ContractError`` if it gives such a number itself.
        """
        config = config or DistAttnConfig()
        pair, row = sum(self.pair_seconds(heads_q, heads_kv, head_dim)), self.row_seconds(heads_kv, head_dim)
        dispatch, overlap = config.dispatch_config, config.overlap_config
        _must_be_default(overlap, OverlapConfig(), "calc_cost_factor", "comm_cost_factor")
        overlap = replace(overlap, calc_cost_factor=pair * _MICRO, comm_cost_factor=row * _MICRO)
        if isinstance(dispatch.alg, LocalityDispatchAlg):
            _must_be_default(dispatch.alg, LocalityDispatchAlg(), "row_cost")
            dispatch = replace(dispatch, alg=LocalityDispatchAlg(row / pair))
        return DistAttnConfig(dispatch, overlap, config.grpcoll_config)

    @property
    def words(self) -> str:
        """Whose rates these are, for people."""
        rate = self.kernel(64, 8, 128)
        numbers = f"{_readable(rate.forward, 'FLOP/s')} forward, {_readable(rate.backward, 'FLOP/s')} backward"
        numbers += f", a link of {_readable(self.link_bytes_per_s, 'B/s')}"
        how = f"measured by `magi tune` over {self.ranks} ranks" if self.is_measured else "assumed"
        return f"{self.device} ({numbers}; {how})"

    # ---- as JSON ------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MachineRates:
        """The inverse of ``dataclasses.asdict``. ``ContractError`` for other data."""
        try:
            return cls(**{**data, "kernels": tuple(KernelRate(**kernel) for kernel in data["kernels"])})
        except (KeyError, TypeError) as error:
            raise ContractError(f"These are no rates of a machine ({error}); run `magi tune`.") from None


def _must_be_default(given: Any, default: Any, *names: str) -> None:
    for name in names:
        if getattr(given, name) != getattr(default, name):
            raise ContractError(
                f"{type(given).__name__}.{name} is {getattr(given, name)}, and rates= says the same; drop one of them."
            )


def _readable(rate: float, unit: str) -> str:
    """Three digits and a prefix, such as 728 TFLOP/s."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"


# ---- the file -----------------------------------------------------------------------------------------


def rates_file() -> Path:
    """``MAGI_ATTENTION_RATES_FILE``, else ``.cache/magi_attention/rates.json`` in the folder that the compiled kernels
    are in, which is the home folder mostly."""
    asked = general.rates_file()
    return Path(asked) if asked else Path(env.workspace_base_dir()) / ".cache" / "magi_attention" / "rates.json"


def read_rates(path: Path) -> list[MachineRates]:
    """All entries of a file; none if there is no file. ``ContractError`` if it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [MachineRates.from_dict(entry) for entry in data["machines"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ContractError(f"{path} holds no rates of machines ({error}); remove it and run `magi tune`.") from None


def find_rates(entries: Sequence[MachineRates], device: str, ranks: int) -> MachineRates | None:
    """The entry of this device and this version of the package whose number of ranks is nearest, the larger one of
    two that are as near; None if there is none."""
    mine = [entry for entry in entries if entry.device == device and entry.version == __version__]
    return min(mine, key=lambda entry: (abs(log2(entry.ranks / ranks)), -entry.ranks), default=None)


def keep_rates(path: Path, rates: MachineRates) -> None:
    """Writes ``rates`` into the file, in place of an entry of the same device, ranks and version."""

    def key(entry: MachineRates) -> tuple[str, int, str]:
        return entry.device, entry.ranks, entry.version

    entries = [entry for entry in read_rates(path) if key(entry) != key(rates)] + [rates]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machines": [asdict(entry) for entry in sorted(entries, key=key)]}, indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)  # so that a reader never sees half of it
