# SPDX-License-Identifier: Apache-2.0
"""DistTestBase: methods run on every rank, and failures and skips come back."""

import sys
import types
import unittest

import torch
import torch.distributed as dist

from magi_attention.testing import DistTestBase, parameterize, with_comms, with_run_in_mp
from magi_attention.testing.flag_generator import FlagCombGenerator
from magi_attention.testing.spawn import RankFailure
from magi_attention.testing.waiting import DEADLINE_S


class TwoRanks(DistTestBase):
    @property
    def world_size(self):
        return 2

    @property
    def backend(self):
        return "gloo"

    @property
    def timeout_s(self):
        return DEADLINE_S


class TestRuns(TwoRanks):
    @with_comms
    def test_all_ranks_meet_and_share_cases(self):
        assert (dist.get_world_size(), dist.get_rank()) == (2, self.rank)
        ranks = torch.tensor([self.rank])
        dist.all_reduce(ranks)
        assert ranks.item() == 1
        assert torch.initial_seed() == self.seed + self.rank == 42 + self.rank
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

    def torch_skips(self):
        """As torch's ``skip_if_lt_x_gpu`` with too few: the process is told to leave with a status of its table.

        The table is a stand-in, because importing torch's needs packages that only tests of torch have.
        """
        skip = types.SimpleNamespace(exit_code=87, message="Need at least 7 CUDA devices")
        helpers = types.SimpleNamespace(TEST_SKIPS={"multi-gpu-7": skip})
        sys.modules["torch.testing._internal.common_distributed"] = helpers
        sys.exit(skip.exit_code)

    def leaves(self):
        sys.exit(3)


def test_failures_and_skips_come_back():
    failed = unittest.TestResult()
    Broken("one_rank_fails").run(failed)
    (_, text), *_ = failed.errors + failed.failures
    assert RankFailure.__name__ in text and "rank 1 says no" in text
    skipped = unittest.TestResult()
    Broken("one_rank_skips").run(skipped)
    assert [reason for _, reason in skipped.skipped] == ["not here"] and skipped.wasSuccessful()


def test_skips_of_torch_are_skips_and_other_exits_are_failures():
    skipped, failed = unittest.TestResult(), unittest.TestResult()
    Broken("torch_skips").run(skipped)
    assert [reason for _, reason in skipped.skipped] == ["Need at least 7 CUDA devices"]
    assert skipped.wasSuccessful()
    Broken("leaves").run(failed)
    (_, text), *_ = failed.errors + failed.failures
    assert RankFailure.__name__ in text and "SystemExit: 3" in text
