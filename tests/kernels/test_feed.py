# SPDX-License-Identifier: Apache-2.0
"""Who copies what for a step of the backward, and when: all of it ends, and nobody reads the words of another step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from feed_model import Config, Machine

from magi_attention.testing.libraries import csrc_or_skip

CONFIGS = {
    "head dim 64 or 128": Config(3, "direct", is_flying=True),
    "head dim 64 or 128 with softcap": Config(3, "direct", is_flying=False),
    "head dim 256": Config(1, "direct", is_flying=False),
    "wide": Config(2, "shares", is_flying=False, is_wide=True),
    "narrow in turns": Config(2, "turns", is_flying=True),
    "narrow in turns with softcap": Config(2, "turns", is_flying=False),
    "narrow in turns, by one lane": Config(2, "turns", is_flying=True, is_alone=True),
    "wide in turns": Config(2, "turns", is_flying=False, is_wide=True),
    "wide in turns, by one lane": Config(2, "turns", is_flying=False, is_wide=True, is_alone=True),
    "head dim 256 in turns": Config(1, "turns", is_flying=False, is_dq_over_ds=True),
}


def test_the_stages_are_those_of_the_kernel():
    source = csrc_or_skip() / "ffa" / "sm90" / "bwd_config.h"
    text = source.read_text()
    assert "kStages = kWide ? 2 : kD > 128 ? 1 : kOrdered ? 2 : 3;" in text
    assert "kAdders = kOrdered && kStages == 2 ? 2 : 1;" in text
    assert "kToldSlots = kOrdered ? 2 * kAdders : kStages;" in text
    assert "kDqOverDs = kOrdered && kD > 128;" in text
    assert "kFlying = !C::kCapped && !C::kWide && C::kStages > 1;" in (source.parent / "bwd_step.cuh").read_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_ends(name):
    for seed in range(150):
        rng = np.random.default_rng(seed)
        units = rng.integers(1, 12, rng.integers(1, 5)).tolist()
        print("seed", seed, units)
        Machine(CONFIGS[name], units, rng).run()


def faults_of(config) -> int:
    found = 0
    for seed in range(150):
        try:
            Machine(config, [20], np.random.default_rng(seed)).run()
        except AssertionError:
            found += 1
    return found


def test_lanes_that_add_need_two_places_each():
    """With as many as there are stages, one lane may add for so long that what it is told next is gone."""
    for name in ("narrow in turns", "wide in turns", "head dim 256 in turns"):
        assert faults_of(replace(CONFIGS[name], places_of_each=1))
