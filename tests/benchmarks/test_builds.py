# SPDX-License-Identifier: Apache-2.0
"""Builds of the kernel library beside each other, without a GPU: which is called, what is refused and printed."""

from __future__ import annotations

import gzip
from types import SimpleNamespace

import builds
import pytest
import torch

from magi_attention.kernels import SdpaOnlineBackend
from magi_attention.native import abi
from magi_attention.native.loader import find
from magi_attention.native.toolchain import FFA_SM90


class StandIn(SdpaOnlineBackend):
    """The PyTorch kernels with the calls of the CUDA backend; notes whether they were to be deterministic."""

    def __init__(self, scale_error: float = 1.0) -> None:
        super().__init__()
        self.deterministic: list[bool] = []
        self.masks: list = []
        self.scale_error = scale_error
        self.library = SimpleNamespace(has=lambda *_: True)

    def forward_final(self, x):
        part = self.forward(x)
        return part.out * self.scale_error, part.lse, None

    def backward_final(self, x):
        self.deterministic.append(x.options.deterministic)
        self.masks.append(x.mask)
        grads = self.backward(x)
        grads.dv *= self.scale_error
        return grads


@pytest.fixture
def on_cpu(monkeypatch):
    """Times of our own, by the order of the builds: 10 us, 20 us and so on; inputs on the CPU."""
    inputs_on = builds.make_inputs

    def make_inputs(case, heads, head_dim, dtype, device, **more):
        return inputs_on(case, heads, head_dim, torch.float32, "cpu", **more)

    monkeypatch.setattr(builds, "make_inputs", make_inputs)
    monkeypatch.setattr(builds, "interleaved_us", lambda calls, *_: {n: [10.0 * i] for i, n in enumerate(calls, 1)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def files(tmp_path):
    found = [tmp_path / f"{name}.so.gz" for name in ("old", "new")]
    for file in found:
        file.write_bytes(gzip.compress(b"library"))
    return found


SHORT = "--heads 4 2 --head-dim 16 --seqlens 96".split()


def test_each_build_is_called_and_compared_with_the_first(on_cpu, files, monkeypatch, capsys):
    made = {}
    monkeypatch.setattr(builds, "backend_of", lambda file, folder: made.setdefault(folder.name, StandIn()))
    assert builds.main([*map(str, files), "--turns", "--masks", "full,varlen_causal", "--samples", "2", *SHORT]) == 0
    header, full, varlen = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["mask", "seqlen", "old", "old+turns", "new", "new+turns"]
    assert full[:2] == ["full", "96"] and full[3:] == varlen[3:] == ["0.500", "0.333", "0.250"]
    assert float(full[2]) == pytest.approx(10 * 96 * 96 * 4 * 16 / 10 / 1e6, abs=0.06)
    # Once for each of three cases, atomic and deterministic.
    assert list(made) == ["old", "new"] and all(b.deterministic == [False, True] * 3 for b in made.values())
    # No mask is used twice, because a work list that one build made is kept with it.
    used = [mask for b in made.values() for mask in b.masks]
    assert len({id(mask) for mask in used}) == len(used) == 12


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("which", ["old", "new"])
def test_a_build_that_is_wrong_is_named_and_fails_the_run(on_cpu, files, monkeypatch, capsys, direction, which):
    monkeypatch.setattr(builds, "backend_of", lambda file, folder: StandIn(1.5 if folder.name == which else 1.0))
    assert builds.main([*map(str, files), "--direction", direction, "--masks", "full", *SHORT]) == 1
    _, reason, row = capsys.readouterr().out.splitlines()
    assert reason.startswith(f"{which} on full, 96 tokens, draw 0: wrong: relative error 0.5")
    assert row.split()[2 if which == "old" else 3] == "-"


@pytest.mark.skipif(find(FFA_SM90) is None, reason="the CUDA kernels are not built here")
def test_libraries_of_two_builds_are_loaded_apart(tmp_path):
    library = find(FFA_SM90)
    packed = tmp_path / "other.so.gz"
    packed.write_bytes(gzip.compress(library.read_bytes(), 1))
    (tmp_path / "to").mkdir()
    first, second = (builds.backend_of(f, tmp_path / "to" / n) for f, n in ((library, "a"), (packed, "b")))
    assert first.library.forward_address != second.library.forward_address
    assert first.library.tile(abi.BF16, 64, 8, 128, 128) == second.library.tile(abi.BF16, 64, 8, 128, 128)
