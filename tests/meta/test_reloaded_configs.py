# SPDX-License-Identifier: Apache-2.0
"""Algorithms and configs after their modules were loaded anew, as notebooks with autoreload do."""

from __future__ import annotations

import importlib
import random

import pytest

from magi_attention.common.mask import Mask
from magi_attention.config import DistAttnConfig
from magi_attention.config import dispatch as dispatch_module
from magi_attention.config import overlap as overlap_module
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.planner import build_plan
from magi_attention.meta.solver.affinity import SampleIDAffinity
from magi_attention.meta.solver.dispatch_solver import DispatchData, DispatchJob, DispatchSolver
from magi_attention.meta.solver.overlap_solver import OverlapSolver, OverlapStageCost

DISPATCH, OVERLAP = dict(vars(dispatch_module)), dict(vars(overlap_module))
ALGS = sorted(n for n, c in DISPATCH.items() if isinstance(c, type) and "_type" in vars(c))
CONFIGS = sorted(n for n in ALGS if DISPATCH[n]._is_partitions_returned)


@pytest.fixture
def new():
    """Both modules loaded once more, in one dictionary; their old classes come back afterwards."""
    pairs = ((dispatch_module, DISPATCH), (overlap_module, OVERLAP))
    yield {name: value for module, _ in pairs for name, value in vars(importlib.reload(module)).items()}
    for module, old in pairs:
        vars(module).update(old)


def test_every_algorithm_is_met() -> None:
    assert len(ALGS) == 11 and len(CONFIGS) == 9


@pytest.mark.parametrize("name", [name for name in ALGS if name != "LocalityDispatchAlg"])
def test_a_new_algorithm_solves_as_the_old_one(name: str, new) -> None:
    assert new[name] is not DISPATCH[name]
    rng = random.Random(name)
    work = [rng.randrange(1, 50) for _ in range(8)]
    ids = [[rng.randrange(4)] for _ in work]
    data = DispatchData(DispatchJob.from_job_list(work, [SampleIDAffinity(x) for x in ids]), 4, [1, 2, 3, 4])
    assert DispatchSolver(new[name]()).solve(data) == DispatchSolver(DISPATCH[name]()).solve(data)


@pytest.mark.parametrize("name", CONFIGS)
def test_old_and_new_classes_go_together_in_a_plan(name: str, new) -> None:
    mask = Mask.varlen([0, 30, 100, 128], causal=True)
    partitions = []
    for config in (DISPATCH["DispatchConfig"], new["DispatchConfig"]):
        for alg in (DISPATCH[name], new[name]):
            for overlap in (OVERLAP, new):
                staged = overlap["OverlapConfig"](degree=2, min_chunk_size=4, alg=new["UniformOverlapAlg"]())
                settings = DistAttnConfig(config(8, alg=alg()), staged)
                partitions.append(build_plan(mask.slices, 128, 4, config=settings).partitions)
    assert partitions == partitions[:1] * 8
    assert new["DispatchConfig"]().alg == new["LocalityDispatchAlg"]()
    assert DISPATCH["DispatchConfig"]().alg == DISPATCH["LocalityDispatchAlg"]()


def test_overlap_algorithms(new) -> None:
    costs = [OverlapStageCost(0.0, 9.0)] + [OverlapStageCost(float(i), 3.0) for i in range(1, 6)]
    for options in ({}, {"random_costs": True, "random_seed": 5}):
        old, now = (OverlapSolver(kinds["UniformOverlapAlg"](**options)).solve(costs) for kinds in (OVERLAP, new))
        assert old == now
    with pytest.raises(UnsupportedError, match="GreedyOverlapAlg is not implemented"):
        OverlapSolver(new["GreedyOverlapAlg"]()).solve(costs)


@pytest.mark.parametrize("kinds", [DISPATCH | OVERLAP, None], ids=["old", "new"])
def test_what_is_no_algorithm_is_refused(kinds, new) -> None:
    kinds = kinds or new
    for base in ("DispatchAlg", "OverlapAlg"):
        with pytest.raises(ContractError, match=f"{base} is only a base class"):
            kinds[base]()

        class Untyped(kinds[base]):  # type: ignore[misc, name-defined]
            pass

        with pytest.raises(ContractError, match="Untyped is only a base class"):
            Untyped()
    for wrong in ("min_heap", DISPATCH["MinHeapDispatchAlg"], OVERLAP["UniformOverlapAlg"]()):
        with pytest.raises(ContractError, match="MinHeapDispatchAlg"):
            kinds["DispatchConfig"](alg=wrong)
    for wrong in ("uniform", OVERLAP["UniformOverlapAlg"], DISPATCH["MinHeapDispatchAlg"]()):
        with pytest.raises(ContractError, match="UniformOverlapAlg"):
            kinds["OverlapConfig"](alg=wrong)
