# SPDX-License-Identifier: Apache-2.0
"""Starts a program that others wrote, as it is, with our attention and our Trainer; ci/strangers.py calls it.

    python ci/strangers_start.py REPLACED PROGRAM.py [ARGUMENT ...]
    python ci/strangers_start.py REPLACED PROGRAM.py::TEST

This file is all that stands between the program and its library. It registers "magi". It makes "magi" the attention of
models that ask for none. It puts ContextParallelMixin before the class REPLACED, written module:class. It turns off
bf16 where TRL would turn it on, because losses are compared in float32. It writes losses to the file that
STRANGERS_LOSSES names. It leaves the clean-up of a test out of its result.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

LOGGED = ("loss", "train_loss", "eval_loss")  # by a script, which is told to log every step


def make_magi_the_default() -> None:
    """For models whose program names no attention."""
    from transformers import PreTrainedModel

    known = PreTrainedModel._check_and_adjust_attn_implementation

    def check(self, attn_implementation, *args, **kwargs):
        return known(self, attn_implementation or "magi", *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = check


def write_line(path: Path, logs: dict, names: tuple[str, ...]) -> None:
    line = {name: float(logs[name]) for name in names if name in logs}
    if line and os.environ.get("RANK", "0") == "0":
        with path.open("a") as file:
            print(json.dumps(line), file=file)


def record_logs(path: Path, names: tuple[str, ...]) -> None:
    from transformers import Trainer

    known = Trainer.log

    def log(self, logs, *args, **kwargs):
        write_line(path, logs, names)
        return known(self, logs, *args, **kwargs)

    Trainer.log = log


def record_steps(path: Path) -> None:
    """The mean over ranks of each step's loss. Most tests log none, and the train_loss that ends a run has the steps
    that were not logged as rank 0 saw them."""
    import torch.distributed as dist
    from transformers import Trainer

    known = Trainer.training_step

    def training_step(self, *args, **kwargs):
        loss = known(self, *args, **kwargs)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        write_line(path, {"step": mean}, ("step",))
        return loss

    Trainer.training_step = training_step


def compute_in_float32() -> None:
    """TRL's configs turn bf16 on unless they are told."""
    from trl.trainer.base_config import _BaseConfig

    known = _BaseConfig.__post_init__

    def post_init(self) -> None:
        self.bf16 = bool(self.bf16)
        known(self)

    _BaseConfig.__post_init__ = post_init


def replace(replaced: str) -> None:
    from magi_attention.integrations.transformers import ContextParallelMixin

    module_name, _, name = replaced.partition(":")
    module = importlib.import_module(module_name)
    setattr(module, name, type(name, (ContextParallelMixin, getattr(module, name)), {}))


def prepare(replaced: str, is_test: bool) -> None:
    from magi_attention.integrations.transformers import register

    register()
    make_magi_the_default()
    path = Path(os.environ["STRANGERS_LOSSES"])
    record_logs(path, ("eval_loss",) if is_test else LOGGED)
    if is_test:
        record_steps(path)
    if replaced.startswith("trl"):
        compute_in_float32()
    replace(replaced)


class Calls:
    """What became of the tests themselves. TRL's clean-up after a test asks for vLLM where there is a process group."""

    def __init__(self) -> None:
        self.passed = self.others = 0

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call":
            self.passed += report.passed
            self.others += not report.passed
        elif report.when == "setup":
            self.others += not report.passed


def run_test(arguments: list[str]) -> int:
    """0 if all tests passed, their clean-up aside; what pytest gives if there were none."""
    import pytest

    calls = Calls()
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *arguments], plugins=[calls]))
    return int(calls.others > 0) if calls.passed or calls.others else code


def run(program: str, arguments: list[str]) -> int:
    """Its exit status."""
    try:
        if "::" in program:
            return run_test([program, *arguments])
        sys.argv = [program, *arguments]
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> None:
    """Without the destructors of libraries: over gloo they abort in some runs, with or without us."""
    import torch.distributed as dist

    if code == 0 and dist.is_available() and dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    prepare(sys.argv[1], "::" in sys.argv[2])
    leave(run(sys.argv[2], sys.argv[3:]))
