# SPDX-License-Identifier: Apache-2.0
"""``DistAttnConfig``: everything a distributed attention is configured by."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from magi_attention.config.checks import is_instance
from magi_attention.config.dispatch import DispatchConfig
from magi_attention.config.grpcoll import GrpCollConfig
from magi_attention.config.overlap import OverlapConfig
from magi_attention.errors import ContractError


@dataclass(frozen=True, init=False)
class DistAttnConfig:
    """Dispatch, overlap and group-collective configuration of one distributed attention.

    The keywords ``high_bandwith_domain_size`` and ``deterministic`` of 1.0.x are accepted, warned about
    and have no effect: the domain follows the device mesh, determinism
    ``MAGI_ATTENTION_DETERMINISTIC_MODE``.
    """

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)

    # Written out so that the retired keywords are arguments without being fields.
    def __init__(
        self,
        dispatch_config: DispatchConfig | None = None,
        overlap_config: OverlapConfig | None = None,
        grpcoll_config: GrpCollConfig | None = None,
        *,
        high_bandwith_domain_size: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        parts = {
            "dispatch_config": (dispatch_config, DispatchConfig),
            "overlap_config": (overlap_config, OverlapConfig),
            "grpcoll_config": (grpcoll_config, GrpCollConfig),
        }
        for name, (value, cls) in parts.items():
            if value is not None and not is_instance(value, cls):
                raise ContractError(f"DistAttnConfig.{name} is {value!r}; give a {cls.__name__}.")
            object.__setattr__(self, name, cls() if value is None else value)
        if high_bandwith_domain_size is not None:
            warnings.warn(
                "DistAttnConfig(high_bandwith_domain_size=) has no effect since 1.0.3; give the key maker a "
                "2-D device mesh and set MAGI_ATTENTION_HIERARCHICAL_COMM=1 instead.",
                DeprecationWarning,
                stacklevel=2,
            )
        if deterministic is not None:
            warnings.warn(
                "DistAttnConfig(deterministic=) has no effect since 1.0.3; "
                "set MAGI_ATTENTION_DETERMINISTIC_MODE=1 instead.",
                DeprecationWarning,
                stacklevel=2,
            )
