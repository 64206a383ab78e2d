# SPDX-License-Identifier: Apache-2.0
"""Windows over ranks: each receives what its queries see and it does not hold, at most a window for a run of tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    LocalityDispatchAlg,
    Mask,
    MinHeapDispatchAlg,
    Plan,
    SequentialDispatchAlg,
    make_plan,
)


def needed(seen: np.ndarray, plan: Plan, rank: int) -> int:
    """Rows of the dense mask that the rank's queries see and that it does not hold."""
    held = plan.position_array(rank)
    held = held[held < len(seen)]
    keys = seen[held].any(axis=0)
    keys[held] = False
    return int(keys.sum())


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    left=st.integers(0, 30),
    right=st.integers(0, 8),
    ranks=st.integers(1, 5),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    alg=st.sampled_from([SequentialDispatchAlg(), LocalityDispatchAlg(), MinHeapDispatchAlg()]),
    over_causal=st.booleans(),
)
def test_only_the_halo_is_received(lengths, left, right, ranks, chunk, alg, over_causal) -> None:
    cu = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    mask = Mask.varlen(cu, window=(left, right))
    config = DistAttnConfig(DispatchConfig(chunk, alg=alg))
    if over_causal:
        plan = make_plan(Mask.varlen(cu, causal=True), ranks, config).with_mask(mask)
    else:
        plan = make_plan(mask, ranks, config)
    received = plan.explain()["rows_received"]
    seen = mask.to_dense()
    for rank, rows in enumerate(received):
        assert rows == needed(seen, plan, rank)
        runs = len(plan.host_ranges(rank))
        assert rows <= (left + right) * runs
        assert runs == 1 or not isinstance(alg, SequentialDispatchAlg)
