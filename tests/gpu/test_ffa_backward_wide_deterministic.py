# SPDX-License-Identifier: Apache-2.0
"""``deterministic=True`` with m-blocks of 80 queries: the tests of the other file once more."""

from __future__ import annotations

import pytest
from places import in_a_process
from test_ffa_backward import explicit_backend_in_poisoned_memory, pytestmark  # noqa: F401
from test_ffa_backward_deterministic import (  # noqa: F401
    short_work_tiles_beside_long_kernels,
    test_in_a_cuda_graph,
    test_options,
    test_random_masks,
    test_right_and_the_same_every_time,
    test_the_same_beside_other_work,
    test_with_multiprocessors_left_free,
    two_at_a_time,
)
from test_ffa_backward_wide import largest_where_possible, m_blocks_of_80  # noqa: F401

from magi_attention.kernels.ffa import backward as ffa_backward


def wide(rank: int, world: int, work) -> bool:
    ffa_backward.select_schedule = largest_where_possible
    return work(rank, world)


@pytest.mark.parametrize("work", (short_work_tiles_beside_long_kernels, two_at_a_time), ids=lambda f: f.__name__)
def test_nobody_waits_for_ever(work):
    assert in_a_process(wide, work)
