# SPDX-License-Identifier: Apache-2.0
"""DistTestBase: methods run on every rank, and failures and skips come back."""

import unittest

import torch
import torch.distributed as dist

from magi_attention.testing import DistTestBase, parameterize, with_comms, with_run_in_mp
from magi_attention.testing.flag_generator import FlagCombGenerator
from magi_attention.testing.spawn import RankFailure


class TwoRanks(DistTestBase):
    @property
    def world_size(self):
        return 2

    @property
    def backend(self):
        return "gloo"

    @property
    def timeout_s(self):
        return 60.0


class TestRuns(TwoRanks):
    @with_comms
    def test_all_ranks_meet_and_share_cases(self):
        assert (dist.get_world_size(), dist.get_rank()) == (2, self.rank)
        ranks = torch.tensor([self.rank])
        dist.all_reduce(ranks)
        assert ranks.item() == 1
        assert torch.initial_seed() == self.seed == 42 + self.rank
        flag = FlagCombGenerator.sync_group({"from": self.rank}, dist.group.WORLD)
        assert flag == {"from": 0}

        self.share_cases()

    @with_run_in_mp
    def share_cases(self):
        cases = []
        parameterize("y", "abc")(parameterize("x", range(8))(lambda _self, x, y: cases.append((x, y))))(self)
        everyone = [None, None]
        dist.all_gather_object(everyone, cases)
        both = sorted(everyone[0] + everyone[1])
        assert both == [(x, y) for x in range(8) for y in "abc"], "each case on exactly one rank"
        assert everyone[0] and everyone[1]


class Broken(TwoRanks):
    """Not collected: run by hand below."""

    __test__ = False

    def one_rank_fails(self):
        assert self.rank == 0, "rank 1 says no"

    def one_rank_skips(self):
        raise unittest.SkipTest("not here")


def test_failures_and_skips_come_back():
    failed = unittest.TestResult()
    Broken("one_rank_fails").run(failed)
    (_, text), *_ = failed.errors + failed.failures
    assert RankFailure.__name__ in text and "rank 1 says no" in text
    skipped = unittest.TestResult()
    Broken("one_rank_skips").run(skipped)
    assert [reason for _, reason in skipped.skipped] == ["not here"] and skipped.wasSuccessful()
