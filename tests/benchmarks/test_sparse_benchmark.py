# SPDX-License-Identifier: Apache-2.0
"""What of the sparse benchmark needs no GPU: its patterns, its check, its peers and its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sparse_bench
import sparse_cases
import sparse_peers
import torch
from kernel import Result, prepare
from peers_backward import by_autograd
from result_files import SPARSE, load
from sparse_check import SparseBackwardCheck, SparseForwardCheck
from sparse_wheels import of_wheels

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["b16_random_0.3", "b16_window", "b8_video", "index_12", "dsa_12"]
TOKENS = 128


@pytest.mark.parametrize("name", NAMES)
def test_patterns_are_what_their_slices_or_lists_say(name):
    case = sparse_cases.make_case(name, TOKENS)
    seen = case.seen(torch.arange(TOKENS))
    assert seen.sum() == case.area and seen.any(1).all()
    if name.startswith("index"):
        assert (seen.sum(1) == 12).all() and case.lists(torch.device("cpu")).counts.eq(12).all()
    elif name.startswith("dsa"):
        number = torch.arange(TOKENS)
        assert torch.equal(seen.sum(1), (number + 1).clamp(max=12)) and not seen[number[:, None] < number].any()
        assert torch.equal(case.lists(torch.device("cpu")).counts[:, 0], seen.sum(1).int())
    else:
        assert torch.equal(torch.from_numpy(case.mask.check().to_dense()), seen)


def wrong(q, k, v, case):
    return sparse_peers.dense(q, k, k[..., -case.head_dim_v :] if v is None else v, case)


@pytest.mark.parametrize("name", NAMES)
def test_all_implementations_are_right_and_wrong_ones_are_found(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = sparse_cases.make_case(name, TOKENS)
    options = sparse_bench.make_parser().parse_args("--heads 4 2 --index-heads 4 --head-dim 16 --dtype fp32".split())
    *tensors, dout = sparse_bench.inputs_of(case, options, "cpu", has_dout=True)
    assert (tensors[2] is None) == name.startswith("dsa")
    makers = {n: m for n, m in sparse_peers.available().items() if n not in ("cudnn_flex", *of_wheels())}
    makers["wrong"] = wrong
    fits = {"magi", "magi_blocks", "magi_attend", "flex"} if name.startswith("b") else {"magi", "flex", "gather"}
    fits -= {"flex"} if name.startswith("dsa") else set()
    for is_forward in (True, False):
        inputs = tensors if is_forward else [*tensors, dout]
        check = (SparseForwardCheck if is_forward else SparseBackwardCheck)(case, *inputs)
        results = {n: Result(name, TOKENS, n) for n in makers}
        made = makers if is_forward else {n: by_autograd(make, is_both=False) for n, make in makers.items()}
        fits -= set() if is_forward else {"flex"}  # which has no gradients on a CPU
        assert set(prepare(case, inputs, made, results, check)) == fits, {n: r.reason for n, r in results.items()}
        assert results["wrong"].reason.startswith("wrong: relative error")
        assert all(results[n].error < 1e-4 for n in fits)
        assert tensors[2] is not None or "not as columns of the keys" in results["flex"].reason


def test_a_run_keeps_to_its_time_and_says_what_it_left_out(tmp_path, capsys):
    tiny = "--seqlens 64 --heads 2 1 --index-heads 2 --head-dim 8 --dtype fp32 --repeats 2".split()
    out = ["--out", str(tmp_path / "sparse")]
    masks = ["--masks", "b16_window,index_4,dsa_4"]
    assert sparse_bench.main([*tiny, *masks, "--only", "magi,gather", *out]) == 0
    assert "Left out" not in capsys.readouterr().out
    run = load(tmp_path / "sparse.json")
    assert run.benchmark == SPARSE and {(c.mask, c.direction, c.heads) for c in run.results} == {
        ("b16_window", d, (2, 1)) for d in ("forward", "backward")
    } | {(m, d, (2, 1)) for m in ("index_4", "dsa_4") for d in ("forward", "backward")}
    written = json.loads((tmp_path / "sparse.json").read_text())
    assert [(s["head_dim"], s.get("head_dim_v")) for s in written["settings"]] == [(8, None), (8, None), (576, 512)]
    for row in (r for r in written["results"] if not r["reason"]):
        of_k, of_v = (1, 1) if row["direction"] == "forward" else (3, 2)
        pair = 2 * (576 * of_k + 512 * of_v if row["mask"] == "dsa_4" else 8 * (of_k + of_v))
        assert row["tflops"] == pytest.approx(2 * row["area"] * pair / row["median_us"] / 1e6)
    assert row["area"] == 4 * 64 - 6  # the first queries of a causal choice have fewer keys
    row = written["results"][0]
    assert row["area"] == 64 * 64 and row["density"] == 1.0 and row["tflops"] > 0
    assert sparse_bench.main([*tiny, *masks, "--seconds", "-1"]) == 0
    assert "Left out, as --seconds -1 were over: forward b16_window 64, backward" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sparse_bench.main([*tiny, "--masks", "b48_window"])
    assert "no whole number of blocks of 48" in capsys.readouterr().err
