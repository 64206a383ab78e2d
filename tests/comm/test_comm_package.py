# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
import torch

import magi_attention.comm as comm
from magi_attention.comm import primitive
from magi_attention.comm.collectives.work import GeneralWork, WorkWithPostProcessFn
from magi_attention.errors import ContractError, UnsupportedError


def test_import_is_cheap():
    code = "import sys, magi_attention.comm; sys.exit('torch.distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_dsink_alias(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "avg")
    assert comm.dsink_all_reduce_op() == "avg"


def test_native_buffers_are_not_here():
    manager = primitive.grpcoll_buffer_mgr
    for call in (manager.initialize, manager.get_buffer, primitive.GrpCollBuffer):
        with pytest.raises(UnsupportedError, match="Leave this call out"):
            call(None)
    for call in (manager.check_initialized, manager.get_config):
        with pytest.raises(RuntimeError, match="never initialised"):
            call(None)
    manager.release_buffer(None, "x"), manager.release_group(None)


class Step:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(self.name)

    def is_completed(self):
        return self.name in self.log


def test_general_work():
    log = []
    work = GeneralWork([Step(log, "a"), Step(log, "b")])
    assert not work.is_completed()
    work.wait()
    assert log == ["a", "b"] and work.is_completed()
    GeneralWork().wait()
    assert GeneralWork().is_completed()
    for kind in (ContractError, TypeError):
        with pytest.raises(kind, match="3 cannot be waited for"):
            GeneralWork([Step(log, "a"), 3]).wait()


@pytest.mark.parametrize("async_op", [False, True])
def test_post_process_runs_once_and_after_the_wait(async_op):
    log = []
    handle = WorkWithPostProcessFn(Step(log, "wait"), lambda *a: log.append("post") or a, async_op)
    assert log == ([] if async_op else ["wait"])
    x = torch.zeros(1)
    assert handle.wait_post_process(x) == (x,)
    assert log == ["wait", "post"]
    for kind in (ContractError, RuntimeError):
        with pytest.raises(kind, match="waited for before"):
            handle.wait_post_process()
    assert WorkWithPostProcessFn().wait_post_process(x) is x
