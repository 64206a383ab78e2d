# SPDX-License-Identifier: Apache-2.0
"""Overlap algorithms and ``OverlapConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field

from magi_attention.common.enum import AttnOverlapMode, OverlapAlgType
from magi_attention.common.scalars import as_float
from magi_attention.config.checks import Algorithm, is_instance, set_ints
from magi_attention.errors import ContractError


@dataclass(frozen=True)
class OverlapAlg(Algorithm):
    """How remote chunks are grouped into stages; use one of the subclasses."""

    _example = "UniformOverlapAlg()"


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """Equal runs of chunks; ``random_costs`` shuffles them first, privately seeded by ``random_seed``."""

    random_costs: bool = False
    random_seed: int | None = None

    _type = OverlapAlgType.UNIFORM


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """Names the greedy algorithm; solving with it raises ``NotImplementedError``, as published."""

    _type = OverlapAlgType.GREEDY


@dataclass(frozen=True, init=False)
class OverlapConfig:
    """How communication of remote keys is hidden behind compute.

    Args:
        mode: STATIC takes ``degree`` stages; DYNAMIC lets the cost model choose the degree.
        degree: number of remote stages. 0 turns overlap off (fetch all, then one kernel). 1 does not force two
            kernels: on GPUs a single stage is waited for, too, where that takes less time than merging its result,
            unless ``MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE`` is set; and where attention takes one launch, that has no
            stages. With DYNAMIC it must be None or left at 1 and is stored as None.
        dynamic_max_degree: the largest degree DYNAMIC may choose; None for no limit.
        min_chunk_size: tokens; remote keys are cut into chunks of at least this many.
        max_num_chunks: at most so many chunks; STATIC needs ``degree <= max_num_chunks``.
        alg: how chunks are grouped into stages.
        calc_cost_factor: time per unit of area.
        comm_cost_factor: time per KV token, in the same unit.
        enable: earlier spelling; False means ``degree=0``.
    Raises:
        ContractError: a number is not positive, ``degree > max_num_chunks``, or mode and degree contradict.
    """

    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    dynamic_max_degree: int | None = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = field(default_factory=UniformOverlapAlg)
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    # Written out because the earlier keyword `enable` is also the name of a property.
    def __init__(
        self,
        mode: AttnOverlapMode = AttnOverlapMode.STATIC,
        degree: int | None = 1,
        dynamic_max_degree: int | None = 8,
        min_chunk_size: int = 512,
        max_num_chunks: int = 64,
        alg: OverlapAlg | None = None,
        calc_cost_factor: float = 1.0,
        comm_cost_factor: float = 1.0,
        *,
        enable: bool | None = None,
    ) -> None:
        mode = AttnOverlapMode.of(mode)
        if enable is not None and not enable:
            mode, degree = AttnOverlapMode.STATIC, 0
        if mode == AttnOverlapMode.DYNAMIC:
            # 1 is the default, so that OverlapConfig(mode=DYNAMIC) means what it says.
            if degree not in (None, 1):
                raise ContractError(
                    f"OverlapConfig(mode=DYNAMIC, degree={degree!r}) says both 'choose' and 'take this'; "
                    "leave the degree out, or use mode=STATIC."
                )
            degree = None
        values = {
            "mode": mode,
            "degree": degree,
            "dynamic_max_degree": dynamic_max_degree,
            "min_chunk_size": min_chunk_size,
            "max_num_chunks": max_num_chunks,
            "alg": UniformOverlapAlg() if alg is None else alg,
            "calc_cost_factor": calc_cost_factor,
            "comm_cost_factor": comm_cost_factor,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        owner = "OverlapConfig"
        set_ints(self, "min_chunk_size", "max_num_chunks", at_least=1)
        if self.dynamic_max_degree is not None:
            set_ints(self, "dynamic_max_degree", at_least=1)
        for name in ("calc_cost_factor", "comm_cost_factor"):
            value = as_float(getattr(self, name), f"{owner}.{name}")
            object.__setattr__(self, name, value)
            if not value > 0:
                raise ContractError(f"{owner}.{name} is {value!r}; give a number above 0.")
        if not is_instance(self.alg, OverlapAlg):
            raise ContractError(f"{owner}.alg is {self.alg!r}; give UniformOverlapAlg().")
        if self.mode == AttnOverlapMode.STATIC:
            if self.degree is None:
                raise ContractError("OverlapConfig(mode=STATIC) needs a degree; only DYNAMIC chooses one.")
            set_ints(self, "degree", at_least=0)
            if self.degree > self.max_num_chunks:
                raise ContractError(
                    f"OverlapConfig.degree {self.degree} exceeds max_num_chunks {self.max_num_chunks}; "
                    "lower the degree or raise max_num_chunks."
                )

    @property
    def no_overlap(self) -> bool:
        """True for ``degree == 0``: fetch everything, then compute once."""
        return self.degree == 0

    @property
    def enable(self) -> bool:
        """True unless ``no_overlap``."""
        return not self.no_overlap
