# SPDX-License-Identifier: Apache-2.0
"""Random masks, and their plans as settings of a page."""

from __future__ import annotations

import numpy as np

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, OverlapConfig, make_plan
from magi_attention.testing.masks import random_slices
from magi_attention.tools.report.plan_data import Setting


def random_mask(seed: int, most: int = 160) -> Mask:
    rng = np.random.default_rng(seed)
    total = int(rng.integers(40, most))
    slices = random_slices(rng, total, total, max_slices=9)
    return Mask.from_slices(slices[:, :2], slices[:, 2:4], slices[:, 4].tolist(), total, total).check()


def settings_of(mask: Mask, cp_sizes=(3, 1, 4), degrees=(2, 0, 1), chunk_size=None, **more) -> list[Setting]:
    """The plans of a mask for all these numbers of ranks and overlap degrees; ``more`` goes to ``make_plan``."""
    found = []
    for cp_size in cp_sizes:
        config = DistAttnConfig(DispatchConfig(chunk_size=chunk_size))
        base = make_plan(mask, cp_size, config, num_heads_q=4, num_heads_kv=2, head_dim=16, **more)
        found += [Setting(base.with_mask(mask, OverlapConfig(degree=degree)), str(degree)) for degree in degrees]
    return found
