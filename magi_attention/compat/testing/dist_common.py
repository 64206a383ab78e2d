# SPDX-License-Identifier: Apache-2.0
"""``DistTestBase``: unittest classes whose methods run on several processes of this machine."""

from __future__ import annotations

import functools
import importlib
import sys
import unittest
from collections.abc import Callable

from magi_attention.compat.testing import (  # noqa: F401
    DEVICE_TYPE,
    INTERFACE,
    NAME,
    NUM_DEVICES,
    PG_DEFAULT_BACKEND,
    PROFILE_ONLY,
    RUN_IN_MP,
    SKIP_WORLD_SIZE,
    TEST_ATTN_CONFIG,
    TEST_WORLD_SIZE,
)  # fmt: skip
from magi_attention.compat.testing.envvars import (  # noqa: F401
    should_run_attn_config,
    should_run_test_case,
    should_run_world_size,
    skip_if_world_size_filtered,
    switch_envvar_context,
)
from magi_attention.testing.spawn import run_processes

TIMEOUT_S = 30 * 60.0


class DistTestBase(unittest.TestCase):
    """Every test method runs in ``world_size`` processes at once; a failure on any rank fails the test.

    Override the properties. Methods that need a process group carry ``@with_comms``; their class must be
    importable by name in a new process (module level).
    """

    rank = -1  # set in the processes
    _is_worker = False

    @property
    def world_size(self) -> int:
        """Number of processes; by default one per CUDA device, at least 2."""
        import torch

        return max(torch.cuda.device_count(), 2)

    @property
    def backend(self) -> str:
        """nccl if every rank has a CUDA device of its own, else gloo."""
        import torch

        return "nccl" if torch.cuda.device_count() >= self.world_size else "gloo"

    @property
    def seed(self) -> int:
        """Seed of rank 0; rank r begins with ``seed + r``."""
        return 42

    @property
    def timeout_s(self) -> float:
        """The attribute ``timeout`` of the class, if it has one; seconds."""
        return float(getattr(self, "timeout", TIMEOUT_S))

    def run(self, result=None):
        """In the parent, replaces the method by one that starts the processes and waits for them."""
        if not self._is_worker:
            name = self._testMethodName
            setattr(self, name, functools.partial(self._run_on_all_ranks, name))
        return super().run(result)

    def _run_on_all_ranks(self, name: str) -> None:
        cls = type(self)
        skips = run_processes(
            self.world_size, _run_method, cls.__module__, cls.__qualname__, name, timeout_s=self.timeout_s
        )
        if any(reason is not None for reason in skips):
            raise unittest.SkipTest(next(reason for reason in skips if reason is not None))

    # The methods of a worker are called one by one, set-up and tear-down as usual, only their errors travel.
    def _run_as_worker(self, rank: int, name: str) -> str | None:
        from magi_attention.compat.utils.dist import set_random_seed

        self._is_worker, self.rank = True, rank
        set_random_seed(self.seed + rank)
        try:
            self.setUp()
            try:
                getattr(self, name)()
            finally:
                self.tearDown()
                self.doCleanups()
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as leave:  # how decorators of torch such as skip_if_lt_x_gpu skip
            if (reason := _skip_of_torch(leave.code)) is None:
                raise
            return reason
        return None

    def init_pg(self) -> None:
        """Joins a process group over ``backend``; the processes start with one over gloo."""
        import torch
        import torch.distributed as dist

        if self.backend == "nccl":
            torch.cuda.set_device(self.rank)
        if dist.is_initialized() and dist.get_backend() == self.backend:
            return
        store = None
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            store = dist.PrefixStore(f"{self.backend}/", store)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size)

    def destroy_pg(self) -> None:
        """Waits for all ranks; the group itself is left to the process that made it."""
        import torch.distributed as dist

        dist.barrier()


def _skip_of_torch(exit_code: object) -> str | None:
    """The reason for which torch's test helpers end a process with this status, or None."""
    helpers = sys.modules.get("torch.testing._internal.common_distributed")
    skips = getattr(helpers, "TEST_SKIPS", {})
    return next((skip.message for skip in skips.values() if skip.exit_code == exit_code), None)


def _run_method(rank: int, world_size: int, module: str, qualname: str, name: str) -> str | None:
    cls = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    return cls(name)._run_as_worker(rank, name)


def with_comms(func: Callable) -> Callable:
    """The method runs inside a process group over ``self.backend``."""

    @functools.wraps(func)
    def wrapped(self, *args, **kwargs):
        self.device_type = "cuda" if self.backend == "nccl" else "cpu"
        self.init_pg()
        out = func(self, *args, **kwargs)
        self.destroy_pg()
        return out

    return wrapped


def with_run_in_mp(func: Callable) -> Callable:
    """The cases of a parameterized method are shared among the ranks instead of run by each."""

    @functools.wraps(func)
    def wrapped(self, *args, **kwargs):
        with switch_envvar_context("MAGI_ATTENTION_PARAMETERIZE_RUN_IN_MP"):
            return func(self, *args, **kwargs)

    return wrapped
