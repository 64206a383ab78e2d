# SPDX-License-Identifier: Apache-2.0
"""The context-parallel benchmark on gloo: its layouts, each peer against dense float64, whole runs, what it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import context_parallel
import cp_kernel
import cp_layout
import cp_magi
import cp_report
import masks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import truth
from peers import Unfit

from magi_attention.common.slices import to_dense
from magi_attention.errors import UnsupportedError
from magi_attention.testing.libraries import planner_if_possible
from magi_attention.testing.spawn import run_processes

WINDOW, BLOCK = 24, 16
HEADS, HEAD_DIM = (8, 4), 8


@pytest.fixture(autouse=True)
def small_masks(monkeypatch):
    monkeypatch.setattr(masks, "WINDOW", WINDOW)
    monkeypatch.setattr(masks, "BLOCK", BLOCK)


def case_of(name: str, total: int, seed: int) -> masks.Case:
    return cp_layout.make_cases(name, total, 2, seed)[-1]


# ---- documents and layouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("parts,multiple", [(1, 1), (2, 1), (3, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", masks.ALL_NAMES)
def test_layouts_hold_every_token_once_and_every_pair_once(name, parts, multiple):
    rng = np.random.default_rng([parts, multiple, *name.encode()])
    for _ in range(4):
        seed, total = int(rng.integers(1 << 30)), int(rng.integers(parts, 200))
        print(f"seed {seed}, {total} tokens")
        case = case_of(name, total, seed)
        layout = cp_layout.Layout(case, parts, multiple)
        held = [layout.positions(part) for part in range(parts)]
        assert {len(rows) for rows in held} == {layout.rows} and layout.rows % multiple == 0
        real = np.concatenate(held)
        assert np.array_equal(np.sort(real[real >= 0]), np.arange(total))
        natural = layout.tokens(np.arange(layout.total))
        assert np.array_equal(real[layout.natural_order()], natural)
        want = case.mask.to_dense()
        got, by_key = (np.zeros((total, total), dtype=int) for _ in range(2))
        for part in range(parts):
            add_pairs(got, layout.local_slices(part), held[part], natural)
            for key_part in range(parts):
                add_pairs(by_key, layout.local_slices(part, key_part), held[part], held[key_part])
        assert np.array_equal(got, want) and np.array_equal(by_key, want)


def add_pairs(counts, table, rows, keys):
    """Adds 1 where a table lets a token see a token; no pad row may see or be seen."""
    dense = to_dense(table.array, len(rows), len(keys))
    assert dense.sum() == table.area
    i, j = np.nonzero(dense)
    assert (rows[i] >= 0).all() and (keys[j] >= 0).all()
    np.add.at(counts, (rows[i], keys[j]), 1)


# ---- peers ----------------------------------------------------------------------------------------------


def dense_truth(case: masks.Case, q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv with autograd."""
    found = truth(q, k, v, torch.from_numpy(case.mask.to_dense()), dout, q.shape[2] ** -0.5)
    return [found.out, found.dq, found.dk, found.dv]


def peer_errors(rank: int, world: int, names: list[str], total: int, seed: int) -> dict[tuple[str, str], object]:
    """Largest error of each peer on each of these masks, or why it does not fit."""
    masks.WINDOW, masks.BLOCK = WINDOW, BLOCK
    kernel = cp_kernel.Kernel(HEADS, HEAD_DIM, torch.float64, torch.device("cpu"))
    groups, found = cp_kernel.Groups(), {}
    for mask in names:
        case = case_of(mask, total, seed)
        gen = torch.Generator().manual_seed(seed)
        shapes = [(total, h, HEAD_DIM) for h in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
        tensors = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
        truth = dense_truth(case, *tensors)
        setting = cp_kernel.Setting(
            case, rank, world, HEADS, HEAD_DIM, torch.float64, torch.device("cpu"), kernel, groups
        )  # fmt: skip
        for name, make in context_parallel.PEERS.items():
            if name == "one_gpu":
                continue
            try:
                peer = make(setting)
            except (Unfit, UnsupportedError) as reason:
                found[name, mask] = str(reason)
                continue
            q, k, v, dout = (cp_kernel.select_rows(x, peer.positions) for x in tensors)
            if peer.uses_autograd:
                q, k, v = (x.requires_grad_() for x in (q, k, v))
            calls = peer.kernel_calls(dout, q, k, v)  # one pass of the peer, or two calls of the kernel, or not told
            assert all(calls) if calls is not None else name in cp_magi.QUERY_MOVES
            step = context_parallel.step_of(peer, q, k, v, dout)
            row = [step.forward(), step.forward()]
            got = [row[0].out.detach(), *step.backward(row)[:3]]
            found[name, mask] = max(
                float((a - cp_kernel.select_rows(b, peer.positions))[peer.positions >= 0].abs().max())
                for a, b in zip(got, truth)
            )
            assert context_parallel.compare(peer, got, truth)
            with pytest.raises(ArithmeticError, match="wrong: relative error .* of dk"):
                context_parallel.compare(peer, [*got[:2], got[2] * 1.03, got[3]], truth)
            peer.close()
    return found


ALWAYS = ["causal", "varlen_full"]
BY_DAY = [*ALWAYS, *(name for name in masks.ALL_NAMES[::4] if name not in ALWAYS)]
BY_NIGHT = pytest.param(4, 172, [*masks.ALL_NAMES], marks=pytest.mark.nightly)


@pytest.mark.parametrize("world,total,of_masks", [(2, 250, ALWAYS), (4, 172, BY_DAY), BY_NIGHT])
def test_peers_equal_dense_float64_attention(world, total, of_masks):
    planner_if_possible()  # without it the ranks take 20 seconds of CPU time in place of 4
    seed = int(np.random.default_rng(world).integers(1 << 30))
    print(f"seed {seed}")
    for found in run_processes(world, peer_errors, of_masks, total, seed):
        errors = {where: error for where, error in found.items() if isinstance(error, float)}
        assert max(errors.values()) < 1e-11, errors
        names = {name for name, _ in errors}
        assert names >= {"magi_a2av_0", "magi_a2av_1", "magi_a2av_2", "ring", "all_gather", "ulysses"}
        assert ("usp" in names) == (world == 4)
        assert len(errors) == len(of_masks) * len(names)  # a peer takes all masks or none
        unfit = {where[0]: reason for where, reason in found.items() if isinstance(reason, str)}
        assert "usp" not in unfit or unfit["usp"].startswith("USP needs two factors")
        assert "CUDA only" in found["torch_cudnn", "causal"]
        assert "full and causal" in found["torch_cudnn", "varlen_full"]


def test_peers_that_do_not_fit_say_why():
    case = masks.Case("causal", 30, (30,))
    setting = cp_kernel.Setting(case, 0, 4, (8, 2), 8, torch.float32, torch.device("cpu"), None, None)
    with pytest.raises(Unfit, match="do not divide over 4 ranks"):
        context_parallel.Ulysses(setting)
    setting = cp_kernel.Setting(case, 0, 4, (8, 4), 8, torch.float32, torch.device("cpu"), None, None)
    with pytest.raises(Unfit, match="30 tokens do not divide"):
        context_parallel.Ulysses(setting)


def test_a_setting_that_this_build_has_not_is_not_timed_under_its_name(monkeypatch):
    unknown = cp_magi.Variant(1, {"MAGI_ATTENTION_NO_SUCH_VARIABLE": "1"})
    monkeypatch.setitem(cp_magi.VARIANTS, "unknown", unknown)
    with pytest.raises(cp_magi.Unfit, match="no variable MAGI_ATTENTION_NO_SUCH_VARIABLE"):
        cp_magi.Magi(None, "unknown")
    assert "MAGI_ATTENTION_NO_SUCH_VARIABLE" not in os.environ


# ---- whole runs -----------------------------------------------------------------------------------------


class Broken:
    """A peer that one rank cannot make, or that is wrong, or that needs memory that is not there."""

    is_whole, uses_autograd = True, False

    def __init__(self, setting, how):
        if how == "one_rank" and setting.rank == 1:
            raise RuntimeError("no such device\nmore lines")
        self.inner, self.how = context_parallel.Ring(setting), how
        self.positions, self.details = self.inner.positions, {}

    def forward(self, q, k, v):
        if self.how == "memory":
            raise torch.OutOfMemoryError("Tried to allocate much")
        return self.inner.forward(q, k, v)

    def backward(self, dout, state, q, k, v):
        dq, dk, dv = self.inner.backward(dout, state, q, k, v)
        return dq * 1.1, dk, dv

    def close(self):
        self.inner.close()


def benchmarks_of(rank: int, world: int, runs: list[str], broken_run: str) -> list[list[cp_report.Cell]]:
    """The cells of each run; those of the last one have broken peers among them."""
    masks.WINDOW, masks.BLOCK = WINDOW, BLOCK
    os.environ["COLUMNS"] = "150"
    found = []
    for arguments in (*runs, broken_run):
        if arguments is broken_run:
            for how in ("one_rank", "wrong", "memory"):
                context_parallel.PEERS[f"magi_{how}"] = lambda setting, how=how: Broken(setting, how)
        options = context_parallel.make_parser().parse_args(arguments.split())
        before = dict(os.environ)
        found.append(context_parallel.run(context_parallel.Bench(options, torch.device("cpu"))))
        assert dict(os.environ) == before and dist.is_initialized()
    return found


SMALL = (
    "--heads 4 2 --head-dim 8 --dtype fp32 --repeats 3 --warm-up 1 --heat-up 0.01 "
    "--wall-repeats 2 --wall-layers 3 --kernel-repeats 1"
)


def test_runs_on_two_ranks(tmp_path):
    """One that measures and writes, one without time, and one whose peers fail."""
    out = tmp_path / "results" / "run"
    whole = f"{SMALL} --masks full,varlen_causal --tokens 64 --packs 2 --out {out}"
    late = f"{SMALL} --masks causal,full --tokens 32 --only ring,ulysses --time-limit 0"
    failing = f"{SMALL} --masks causal --tokens 32 --only {','.join(FAILING)},ring"
    results = run_processes(2, benchmarks_of, [whole, late], failing)
    check_what_was_written(out, results[0][0])
    for _, cells_without_time, cells_of_failures in results:
        assert len(cells_without_time) == 4
        assert {cell.reason for cell in cells_without_time} == {"not begun within the time limit of 0 s"}
        check_failures({cell.name: cell for cell in cells_of_failures})


def check_what_was_written(out: Path, cells: list[cp_report.Cell]) -> None:
    data = json.loads(out.with_suffix(".json").read_text())
    assert {"commit", "torch", "host"} <= set(data["environment"])
    settings = data["settings"]
    assert (settings["world"], settings["communication"], settings["kernel_backend"]) == (2, "gloo", "sdpa_ol")
    assert settings["seed"] == 42 and settings["heads"] == [4, 2]
    assert len(data["cells"]) == 2 * len(context_parallel.DEFAULT_PEERS)
    assert [(c["mask"], c["tokens_per_gpu"], c["name"]) for c in data["cells"]] == [
        (c.mask, c.tokens_per_gpu, c.name) for c in cells
    ]
    good = [c for c in data["cells"] if not c["reason"]]
    assert {c["name"] for c in good} >= {"one_gpu", "magi_a2av_1", "ring", "all_gather", "ulysses"}
    for cell in data["cells"]:
        assert bool(cell["reason"]) != bool(cell["both"]) and not cell["is_failure"]
    for cell in good:
        check_cell(cell)
    if pytest.importorskip("matplotlib"):
        assert out.with_suffix(".png").stat().st_size > 10_000


FAILING = ("magi_one_rank", "magi_wrong", "magi_memory")


def check_failures(of: dict[str, cp_report.Cell]) -> None:
    """They are recorded and do not stop the others."""
    assert of["magi_one_rank"].reason == "rank 1: RuntimeError: no such device"
    assert of["magi_wrong"].reason.startswith("ArithmeticError: wrong: relative error 0.1")
    assert of["magi_memory"].reason == "OutOfMemoryError: Tried to allocate much"
    assert all(of[name].is_failure for name in FAILING)
    assert of["ring"].reason is None and of["ring"].both["tflops"] > 0


def check_cell(cell: dict) -> None:
    is_varlen = cell["mask"] == "varlen_causal"
    assert len(cell["packs"]) == (2 if is_varlen else 1)
    for direction, flops in (("forward", 4), ("backward", 10), ("both", 14)):
        rates = []
        for pack in cell["packs"]:
            times = pack["times"][direction]
            assert 0 < times["host_ms"] <= times["wall_ms"] and 0 < times["kernel_ms_mean"] <= times["kernel_ms_max"]
            assert times["exposed_ms_mean"] <= times["exposed_ms_max"]
            rates.append(flops * pack["area"] * 4 * 8 / 2 / times["ms"] / 1e9)
            assert times["tflops"] == pytest.approx(rates[-1])
        assert cell[direction]["tflops"] == pytest.approx(np.mean(rates))
    for pack in cell["packs"]:
        assert pack["memory"] is None  # of GPUs only
        assert cell["name"] == "one_gpu" or set(pack["errors"]) == {"out", "dq", "dk", "dv"}
        if not is_varlen:
            assert pack["area"] == (2 * cell["tokens_per_gpu"]) ** 2
