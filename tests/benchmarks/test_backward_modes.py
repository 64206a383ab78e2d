# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the backward's modes, without a GPU: what is changed, where that counts, and what is summed up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import backward_modes  # noqa: E402
from backward_modes import CHOSEN, MODES, Gradients  # noqa: E402
from masks import make_case  # noqa: E402

from magi_attention.kernels import SdpaOnlineBackend  # noqa: E402
from magi_attention.kernels.ffa import backward as ffa_backward  # noqa: E402
from magi_attention.kernels.ffa import plans  # noqa: E402
from magi_attention.native.ffa import BackwardNeeds, FfaLibrary  # noqa: E402
from magi_attention.native.schedule import BwdSchedule, Split, WorkTileShape  # noqa: E402

SCHEDULE = BwdSchedule(80, 2, first_writer=True, by_document=True, split=Split(0, 3, 2), direct_dq_store=True)
NEEDS = BackwardNeeds(128, 0, True, (5, 4))
SHAPE = WorkTileShape(2, 2, 132, 132)


class StandIn(SdpaOnlineBackend):
    """The PyTorch kernels with the calls of the CUDA backend; notes what a backward is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[BwdSchedule, BackwardNeeds, bool]] = []

    def forward_final(self, x):
        part = self.forward(x)
        return part.out, part.lse, None

    def backward_final(self, x):
        schedule = ffa_backward.select_schedule(x.q.shape, x.v.shape, x.mask, x.options, 132)
        needs = FfaLibrary.backward_prefix(SimpleNamespace())[1]
        self.calls.append((schedule, needs, plans.with_schedule(np.zeros(4), SHAPE)[0] == 1))
        return self.backward(x)


@pytest.fixture
def chosen(monkeypatch):
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: SCHEDULE)
    monkeypatch.setattr(FfaLibrary, "backward_prefix", lambda *_, **__: (b"", NEEDS))
    monkeypatch.setattr(plans, "with_schedule", lambda words, shape, *_: words + (not shape.keeps_plan_order))


def call_of(mode: backward_modes.Mode) -> tuple[Gradients, StandIn]:
    case, backend = make_case("causal", 64), StandIn()
    tensors = [torch.randn(64, heads, 8) for heads in (4, 2, 2, 4)]
    return Gradients(mode, *tensors, case, is_both=False, backend=backend), backend


def test_each_mode_changes_one_thing_and_puts_it_back(chosen):
    wanted = {
        "m-blocks of 80": {"block_m": 64, "split": Split(0, 0, 0)},
        "first writer": {"first_writer": False, "direct_dq_store": False},
        "by document": {"by_document": False},
        "direct store": {"direct_dq_store": False},
        "tile split": {"split": Split(0, 0, 0)},
        "head split": {"num_head_splits": 0},
    }
    for name, mode in MODES.items():
        call, backend = call_of(mode)
        assert not call.counts
        call()
        (noted,) = backend.calls
        needs = {"work list": NEEDS._replace(takes_list=False), "tail split": NEEDS._replace(tail=(0, 1))}.get(
            name, NEEDS
        )
        assert noted == (SCHEDULE._replace(**wanted.get(name, {})), needs, name != "waves"), name
        assert call.counts, name
        assert ffa_backward.select_schedule() is SCHEDULE and plans.with_schedule(np.zeros(4), SHAPE)[0] == 1


def test_a_mode_that_is_off_does_not_count(chosen, monkeypatch):
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(64, 0))
    monkeypatch.setattr(
        FfaLibrary, "backward_prefix", lambda *_, **__: (b"", NEEDS._replace(takes_list=False, tail=(0, 1)))
    )
    monkeypatch.setattr(plans, "with_schedule", lambda words, *_: words)
    counts = {}
    for name, mode in MODES.items():
        call, _ = call_of(mode)
        call()
        counts[name] = call.counts
    assert [name for name in MODES if counts[name]] == ["first writer", "by document"], "these may be turned on"


def test_only_modes_of_deterministic_backwards_are_tried_in_those(chosen, monkeypatch):
    monkeypatch.setattr(backward_modes, "FfaBackend", StandIn)
    make = backward_modes.make_inputs
    monkeypatch.setattr(
        backward_modes,
        "make_inputs",
        lambda case, heads, dim, dtype, device, **more: make(case, heads, dim, torch.float32, "cpu", **more),
    )
    found = {}
    for arguments in ([], ["--deterministic"]):
        options = backward_modes.make_parser().parse_args(["--heads", "4", "2", "--head-dim", "8", *arguments])
        found[bool(arguments)] = list(backward_modes.calls_of(make_case("causal", 64), options))
    assert found[False] == [CHOSEN, *MODES]
    assert found[True] == [CHOSEN, *(n for n in MODES if n not in backward_modes.NOT_DETERMINISTIC)]


def test_figures_and_their_summary():
    figures = [
        backward_modes.figures_of({CHOSEN: 90.0, "m-blocks of 80": 100.0, "waves": 90.0}),
        backward_modes.figures_of({CHOSEN: 90.0, "m-blocks of 80": 81.0}),
    ]
    assert figures == [{"m-blocks of 80": 0.9, "waves": 1.0}, {"m-blocks of 80": 90 / 81}]
    head, blocks, waves = backward_modes.summary(figures)
    assert head.split()[0] == "mode"
    assert blocks.split()[3:] == ["2", "1.000", "0.900", "1.111", "2"] and waves.split()[1:] == [
        "1",
        "1.000",
        "1.000",
        "1.000",
        "0",
    ]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backward_modes.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
