# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share: how large it is (what is needed at first, and a quarter more where it has to grow), and who
may share it."""

from __future__ import annotations

import logging
import os
import random
from types import SimpleNamespace

import pytest

from magi_attention.comm.symm import buffers as symm_buffers
from magi_attention.comm.symm.buffers import _GRAIN, SymmGroup, View, why_no_symm_buffers
from magi_attention.errors import PeerFailureError
from magi_attention.native import abi


def sizes_made(wanted: list[int]) -> list[int]:
    """The sizes of the buffers that a group makes for uses of so many bytes, one after the other."""
    group, made = object.__new__(SymmGroup), []
    group._buffers = {}
    group._make = lambda name, data_bytes: made.append(data_bytes) or SimpleNamespace(data_bytes=data_bytes)
    for needed in wanted:
        assert group.buffer("keys", needed).data_bytes >= needed
    return made


def test_one_size_is_made_as_it_is() -> None:
    assert sizes_made([5 * _GRAIN] * 9) == [5 * _GRAIN]
    assert sizes_made([5 * _GRAIN - 3, 4 * _GRAIN, 1]) == [5 * _GRAIN]


def test_masks_of_all_sizes_make_few_boxes() -> None:
    """All ranks wait for each, and keys that used the old ones hold them."""
    for seed in range(50):
        draw = random.Random(seed)
        made = sizes_made([int(draw.lognormvariate(4, 0.5) * _GRAIN) for _ in range(1000)])
        assert len(made) <= 9 and all(b >= a + a // 4 for a, b in zip(made, made[1:])), (seed, made)


A, B = View("host", 0, "GPU-a"), View("host", 1, "GPU-b")
SHARED, RENUMBERED = [A, A], [A, View("host", 0, "GPU-b")]


@pytest.mark.parametrize("views", [SHARED, RENUMBERED], ids=["shared", "renumbered"])
def test_gpus_of_one_number_are_used_by_wish_alone(views, monkeypatch, caplog) -> None:
    group = SimpleNamespace()
    transport = object.__new__(symm_buffers.TorchTransport)
    transport._group = lambda: group
    known = {"views": views}
    monkeypatch.setattr(symm_buffers, "attached", lambda g: known)
    reason = why_no_symm_buffers(transport)
    assert ("share a GPU" if views is SHARED else "CUDA_VISIBLE_DEVICES") in reason
    with caplog.at_level(logging.WARNING, "magi_attention.comm"):
        for _ in range(3):
            assert why_no_symm_buffers(transport, by_wish=True) is None
    assert [r.getMessage().startswith(reason) for r in caplog.records] == [True]
    known["views"] = [*views, View("elsewhere", 2, "GPU-c")]
    assert why_no_symm_buffers(transport, by_wish=True) == why_no_symm_buffers(transport) == "The ranks are on 2 hosts."
    known["views"] = [*views, View("host", 2, "", "there is no CUDA device")]
    assert why_no_symm_buffers(transport, by_wish=True) == "On rank 2 there is no CUDA device."


def test_a_gpu_each_needs_no_wish() -> None:
    assert symm_buffers._overlap([A, B]) is None and symm_buffers._judge([A, B]) is None


@pytest.mark.parametrize(
    "capability, portable, has_kernels",
    [((9, 0), "0", True), ((9, 0), "1", False), ((8, 0), "0", False), ((12, 0), "0", False), ((7, 5), "0", False)],
)
def test_the_group_hears_of_a_gpu_whose_kernels_stay_alone(capability, portable, has_kernels, monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_PORTABLE_KERNELS", portable)
    monkeypatch.setattr(symm_buffers.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(symm_buffers.torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(symm_buffers.torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=f"GPU-{d}"))
    monkeypatch.setattr(symm_buffers.torch.cuda, "get_device_capability", lambda d: capability if d == 1 else (9, 0))
    view = View.own()
    assert (view.device, view.uuid) == (1, "GPU-1")
    reason = symm_buffers._judge([A, view])
    if has_kernels:
        assert view.missing is None
    else:
        name = "{}.{}".format(*capability)
        assert f"On rank 1 the attention kernels for compute capability {name} do not run" in reason


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_torch_is_told_of_the_overlap_and_only_then(before, monkeypatch) -> None:
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    with symm_buffers._may_overlap(False):
        assert os.environ.get(name) == before
    with pytest.raises(KeyError), symm_buffers._may_overlap(True):
        assert os.environ[name] == "1"
        raise KeyError
    assert os.environ.get(name) == before


def test_errors_name_who_did_not_deliver_and_whose_log_to_read(monkeypatch) -> None:
    """Rank 1 has waited for rank 3, which has ended."""
    told = []
    board = SimpleNamespace(suspect=lambda peer, call: (3, f" Rank {peer} is alive. {call}?"), give_up=told.append)
    monkeypatch.setattr(symm_buffers, "TorchTransport", lambda group: board)
    group = object.__new__(SymmGroup)
    group._failed_peer_view, group.rank_of_signal = [0], {7: 1}
    group._group, group.timeout_ms, group._has_told = lambda: "the group", 5000, False
    group.check("a forward")
    for word in (1 + 1, 1 + abi.SYMM_FAILED_SIGNAL + 7):  # a rank, and a signal of a launch
        group._failed_peer_view = [word]
        with pytest.raises(PeerFailureError) as info:
            group.check("a backward")
        text = str(info.value)
        assert text.startswith("Rank 1 did not deliver within 5 s in a forward or a call before it"), text
        assert "found in a backward" in text and "alive. a forward? Look at the log of rank 3;" in text, text
    assert told == [text], "others are told once"
