# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several processes of this machine, for tests."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from magi_attention.testing.waiting import DEADLINE_S

# What the server of forks imports: always, and where this process has done so, as tests need it in most ranks then.
_PRELOADED = ["torch", "torch.distributed", "magi_attention.api", "magi_attention.testing.spawn"]
_PRELOADED_IF_IMPORTED = ["torch._dynamo.backends.debugging", "torch.distributed.fsdp", "pytest"]


class RankFailure(RuntimeError):
    """One or more ranks failed; the text holds the traceback of each."""


def run_processes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = DEADLINE_S,
    grace_s: float = 60.0,
    backend: str = "gloo",
    fresh: bool = False,
) -> list:
    """``fn(rank, world_size, *args)`` in ``world_size`` processes that share a default process group.

    ``fn`` must be importable (module level). It is called after ``init_process_group`` (file store) and the
    group is destroyed after it. Returns the results, pickled across, in rank order. If a rank raises, dies or
    is not done after ``timeout_s``, all are killed and ``RankFailure`` shows what every rank reported. After the
    first failure the others have ``grace_s``. A rank that ends by ``os._exit(0)`` on purpose counts as finished
    with result None. With an NCCL ``backend`` each rank takes the GPU of its number.

    On Linux without a CUDA device the ranks are forks of a process that has imported torch once and called nothing.
    With ``fresh`` each rank is an interpreter of its own, whose hashes of strings, too, differ from the others'.
    """
    context = mp.get_context("spawn") if fresh or not _can_fork(backend) else _fork_server()
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="magi_spawn_") as folder:
        procs = [
            context.Process(
                target=_rank_main, args=(r, world_size, folder, timeout_s, backend, environment, fn, args), daemon=True
            )
            for r in range(world_size)
        ]
        try:
            for proc in procs:
                proc.start()
            deadline = time.monotonic() + timeout_s
            while any(p.is_alive() for p in procs) and time.monotonic() < deadline:
                if any(p.exitcode not in (None, 0) for p in procs):
                    # the others get a moment, because their reports tell more about the cause
                    deadline = min(deadline, time.monotonic() + grace_s)
                time.sleep(0.02)
            late = [r for r, p in enumerate(procs) if p.is_alive()]
        finally:
            for proc in procs:
                if proc.is_alive():
                    proc.kill()
                if proc.pid is not None:
                    proc.join()
        return _collect(folder, procs, late, f"{timeout_s:g} s, or {grace_s:g} s after a failure")


def run_program(world_size: int, path: str | os.PathLike[str], *arguments: str) -> list[str]:
    """What a program printed on each rank: ``path`` is run as ``torchrun`` would, in processes of ``run_processes``.

    The default process group is there already, so that which the program makes and destroys is this one.
    """
    return run_processes(world_size, _run_as_main, str(path), arguments)


def _run_as_main(rank: int, world_size: int, path: str, arguments: tuple[str, ...]) -> str:
    import torch.distributed as dist

    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCHELASTIC_RUN_ID="none")
    sys.argv, printed = [path, *arguments], io.StringIO()
    sys.path.insert(0, os.path.dirname(path))
    group = {"init_process_group": mock.DEFAULT, "destroy_process_group": mock.DEFAULT}
    with mock.patch.multiple(dist, **group), redirect_stdout(printed), redirect_stderr(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{path} ended with {stop.code!r}.\n{printed.getvalue()}") from stop
    return printed.getvalue()


def _can_fork(backend: str) -> bool:
    import torch

    return sys.platform == "linux" and "nccl" not in backend and not torch.cuda.is_available()


def _fork_server() -> Any:
    """The context whose processes are forks of one server; the server ends with this process."""
    from multiprocessing import forkserver

    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _PRELOADED_IF_IMPORTED if name in sys.modules)])
    before = dict(os.environ)
    try:
        # why: a process with threads must not be forked, and the server must import what this process would
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _set_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _collect(folder: str, procs: list, late: list[int], limits: str) -> list:
    results, failures = [], []
    for rank, proc in enumerate(procs):
        path = os.path.join(folder, f"result{rank}")
        outcome: tuple[bool, Any] = (proc.exitcode == 0, None)
        if os.path.exists(path):
            with open(path, "rb") as file:
                outcome = pickle.load(file)
        elif rank in late:
            outcome = (False, f"still running when time was up ({limits})")
        elif not outcome[0]:
            outcome = (False, f"died with exit code {proc.exitcode} and left no report")
        results.append(outcome[1])
        if not outcome[0]:
            failures.append(f"--- rank {rank} ---\n{outcome[1]}")
    if failures:
        raise RankFailure(f"{len(failures)} of {len(procs)} ranks failed.\n" + "\n".join(failures))
    return results


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    backend: str,
    environment: dict[str, str],
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    _set_environment(environment)  # a fork has that of the server
    import torch
    import torch.distributed as dist

    # why: gloo fails or hangs in a rank that is still connecting to a group when another ends or leaves that group;
    # with this torch lets nobody have a new group before all have it
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    path = os.path.join(folder, f"result{rank}")
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        _write(path, (True, fn(rank, world_size, *args)))
        dist.destroy_process_group()
    except BaseException:
        _write(path, (False, traceback.format_exc()))
        os._exit(1)  # why: gloo's threads may still wait for a rank that is gone


def _write(path: str, outcome: tuple[bool, Any]) -> None:
    with open(path + ".part", "wb") as file:
        pickle.dump(outcome, file)
    os.replace(path + ".part", path)
