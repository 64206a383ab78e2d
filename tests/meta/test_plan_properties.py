# SPDX-License-Identifier: Apache-2.0
"""Properties of plans over random masks. Each failure prints the seed that reproduces it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from magi_attention.common.disjoint import first_overlap
from magi_attention.common.enum import AttnOverlapMode
from magi_attention.common.slices import SliceTable
from magi_attention.config import (
    DispatchConfig,
    DistAttnConfig,
    OverlapConfig,
    RandomSelectDispatchAlg,
    UniformOverlapAlg,
)
from magi_attention.meta.planner import build_plan
from magi_attention.testing.masks import random_slices

sys.path.insert(0, str(Path(__file__).parent))
from plan_oracle import EVEN_ALGS, UNEVEN_ALGS, check_plan  # noqa: E402

BATCH = 100


def random_config(rng: np.random.Generator, total: int, cp: int) -> DistAttnConfig:
    uneven = bool(rng.random() < 0.3)
    algs = UNEVEN_ALGS if uneven else EVEN_ALGS
    largest = max(1, (total - 1) // max(cp - 1, 1)) if cp > 1 else total
    chunk = int(rng.integers(1, max(2, min(largest, 9))))
    if rng.random() < 0.25:
        overlap = OverlapConfig(mode=AttnOverlapMode.DYNAMIC, min_chunk_size=int(rng.integers(1, 8)))
    else:
        overlap = OverlapConfig(
            degree=int(rng.integers(0, 5)),
            min_chunk_size=int(rng.integers(1, 8)),
            max_num_chunks=int(rng.integers(4, 12)),
            alg=UniformOverlapAlg(random_costs=bool(rng.random() < 0.5), random_seed=7),
        )
    return DistAttnConfig(DispatchConfig(chunk, uneven, algs[rng.integers(len(algs))]), overlap)


def random_case(seed: int, max_total: int = 48, cps: tuple[int, ...] = (1, 2, 3, 4, 5, 8)):
    rng = np.random.default_rng(seed)
    cp = int(rng.choice(cps))
    total = int(rng.integers(cp, max(max_total, cp) + 1))
    slices = SliceTable(random_slices(rng, total, total, max_slices=8))
    assert first_overlap(slices.array) is None
    return slices, total, cp, random_config(rng, total, cp)


@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=pytest.mark.nightly if n >= 5 else ()) for n in range(10)], ids=str
)
def test_every_pair_is_computed_once_and_sends_match_receives(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        slices, total, cp, config = random_case(seed)
        try:
            check_plan(build_plan(slices, total, cp, config=config))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {total} tokens, cp {cp}, {config}\n{slices.array.tolist()}") from error


@pytest.mark.parametrize("seed", range(40))
def test_plans_for_up_to_64_ranks(seed: int) -> None:
    slices, total, cp, config = random_case(10_000 + seed, max_total=600, cps=(16, 31, 64))
    check_plan(build_plan(slices, total, cp, config=config), pairs=seed % 8 == 0)


def test_every_rank_makes_the_same_bytes() -> None:
    import pickle

    slices, total, cp, config = random_case(3, cps=(4,))
    first, second = (build_plan(slices, total, cp, config=config) for _ in range(2))
    first.rank(2)  # what was looked at must not show
    assert first == second and hash(first) == hash(second)
    assert pickle.dumps(first) == pickle.dumps(second)
    assert pickle.loads(pickle.dumps(first)) == first
    check_plan(pickle.loads(pickle.dumps(first)))


def test_planning_leaves_the_global_random_state_alone() -> None:
    import random

    random.seed(1)
    expected = random.random()
    random.seed(1)
    alg = UniformOverlapAlg(random_costs=True, random_seed=None)
    config = DistAttnConfig(
        DispatchConfig(2, False, RandomSelectDispatchAlg()), OverlapConfig(degree=3, min_chunk_size=2, alg=alg)
    )
    slices = SliceTable(np.array([[0, 64, 0, 64, 1]]))
    plans = [build_plan(slices, 64, 4, config=config) for _ in range(2)]
    assert plans[0] == plans[1]
    assert random.random() == expected
