# SPDX-License-Identifier: Apache-2.0
"""What of the kernel benchmark needs no GPU: its masks, its reference, its table, plot and command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import kernel
import masks
import numpy as np
import peers
import pytest
import reference
import result_file
import torch
from result_files import load

from magi_attention.benchmarking import timing
from magi_attention.kernels import AttnOptions, SdpaOnlineBackend
from magi_attention.kernels.types import Operands


def dense(case: masks.Case) -> np.ndarray:
    """The mask by its predicate."""
    i = torch.arange(case.seqlen)
    predicate = case.predicate(torch.from_numpy)
    if predicate is None:
        return np.ones((case.seqlen, case.seqlen), dtype=bool)
    return predicate(0, 0, i[:, None], i[None]).numpy()


@pytest.mark.parametrize("name", masks.ALL_NAMES)
@pytest.mark.parametrize("seqlen", [700, 2500])
def test_slices_equal_the_predicate(name, seqlen):
    case = masks.make_case(name, seqlen, sample=1)
    assert case.mask.total_q == case.mask.total_k == seqlen
    want = dense(case)
    assert case.mask.area == want.sum()
    assert np.array_equal(case.mask.check().to_dense(), want)


def test_documents_follow_the_distribution_and_the_seed():
    assert masks.sample_documents(10_000, 3) == masks.sample_documents(10_000, 3) != masks.sample_documents(10_000, 4)
    lengths = masks.sample_documents(20_000_000, 0)
    assert sum(lengths) == 20_000_000 and min(lengths) >= 1 and max(lengths) <= 65536
    total = sum(weight for *_, weight in masks._SHORT_DOCUMENTS)
    for low, high, weight in masks._SHORT_DOCUMENTS:
        share = np.mean([low < n <= high for n in lengths])
        assert abs(share - weight / total) < 0.012, (low, high)
    with pytest.raises(ValueError, match="Unknown mask 'diagonal'"):
        masks.make_case("diagonal", 8)


@pytest.mark.parametrize("name", masks.NAMES)
def test_reference_rows(name):
    case = masks.make_case(name, 300, sample=2)
    q, k, v = kernel.make_inputs(case, (4, 2), 16, torch.float32, "cpu")
    rows = np.array([0, 1, 150, 299])
    seen = torch.from_numpy(reference.seen_keys(case, rows))
    got = reference.reference_rows(q, k, v, seen, torch.from_numpy(rows))
    want = SdpaOnlineBackend().forward(Operands(q, k, v, case.mask.slices, AttnOptions(0.25))).out[rows]
    assert reference.relative_error(got, want) < 1e-5
    assert reference.relative_error(got * 1.02, want) > reference.TOLERANCE
    assert reference.relative_error(got.index_fill(0, torch.tensor([1]), torch.nan), want) == float("inf")


def test_wrong_failing_and_unfit_implementations_are_not_timed():
    case = masks.make_case("causal", 64)
    tensors = kernel.make_inputs(case, (2, 1), 16, torch.float32, "cpu")

    def right(q, k, v, case):
        return lambda: SdpaOnlineBackend().forward(Operands(q, k, v, case.mask.slices, AttnOptions(0.25))).out

    def wrong(q, k, v, case):
        return lambda: SdpaOnlineBackend().forward(Operands(q, k, v, case.mask.slices, AttnOptions(0.3))).out

    def unfit(q, k, v, case):
        raise peers.Unfit("Too small for me.")

    def failing(q, k, v, case):
        raise RuntimeError("no kernel image\nmore lines")

    makers = {"magi": right, "wrong": wrong, "unfit": unfit, "failing": failing}
    results = {n: kernel.Result("causal", 64, n) for n in makers}
    assert list(kernel.prepare(case, tensors, makers, results)) == ["magi"]
    assert results["magi"].reason is None and results["magi"].error < 1e-5
    assert results["wrong"].reason.startswith("wrong: relative error")
    assert results["unfit"].reason == "Too small for me."
    assert results["failing"].reason == "RuntimeError: no kernel image"


def test_ours_says_when_it_is_not_there_and_peers_refuse_masks_they_lack():
    block = masks.make_case("varlen_block_causal", 64)
    q, k, v = kernel.make_inputs(block, (2, 1), 16, torch.bfloat16, "cpu")
    flash = peers._flash_attention(lambda *a, **k: None, lambda *a, **k: None)
    for make in (peers._sdpa("CUDNN_ATTENTION"), peers._sdpa("FLASH_ATTENTION"), flash):
        with pytest.raises(peers.Unfit):
            make(q, k, v, block)
    assert list(peers.available(no_peers=True)) == ["magi", "magi_host", "magi_attend"]
    assert list(peers.available())[:6] == ["magi", "magi_host", "magi_attend", "cudnn", "fa2", "flex"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    small = "--masks causal --seqlens 32 --heads 2 1 --head-dim 8 --dtype fp32 --repeats 2".split()
    assert kernel.main([*small, "--only", "magi,magi_attend"]) == 0
    told = capsys.readouterr().out
    assert "say nothing about GPUs" in told and "[1 of 1] forward causal, 32 tokens" in told
    with pytest.raises(SystemExit):
        kernel.main([*small, "--host"])
    assert "--graph and --host need a CUDA GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="short lengths, for the CPU")
def test_several_pairs_of_heads(tmp_path, capsys):
    small = "--masks causal --seqlens 32 --head-dim 8 --dtype fp32 --repeats 2 --only magi,magi_attend".split()
    assert kernel.main([*small, "--heads", "4", "1", "2", "2", "--out", str(tmp_path / "run")]) == 0
    words = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["causal", "32", "4/1"] in words and ["causal", "32", "2/2"] in words
    results = load(tmp_path / "run.json").results
    found = {(cell.heads, name) for cell in results for name in results[cell]}
    assert found == {(heads, name) for heads in ((4, 1), (2, 2)) for name in ("magi", "magi_attend")}
    for wrong in (["4"], ["4", "3"], ["4", "0"]):
        with pytest.raises(SystemExit):
            kernel.main([*small, "--heads", *wrong])
        assert "--heads takes pairs" in capsys.readouterr().err


def test_table_json_and_plot(tmp_path):
    def result(mask, seqlen, name, tflops, **more):
        return kernel.Result(mask, seqlen, name, tflops=tflops, median_us=100.0, **more)

    results = [
        result("causal", 4096, "magi", 600.0, host_us=12.3),
        result("causal", 4096, "cudnn", 500.0),
        result("causal", 1024, "magi", 300.0),
        result("causal", 1024, "cudnn", 0.0, reason="no kernel"),
    ]
    text = kernel.table(results, ["magi", "cudnn"])
    lines = text.splitlines()
    assert lines.pop(0) == "Attention forward, TFLOP/s"
    assert lines[2].split() == ["causal", "4K", "600", "500", "100.0", "1.20", "12.3"]
    assert lines[3].split() == ["causal", "1K", "300", "-", "100.0", "-", "-"]
    assert lines[4] == "cudnn on causal, 1024 tokens: no kernel"
    options = kernel.make_parser().parse_args([])
    kernel.save(results, options, tmp_path / "a" / "run")
    data = json.loads((tmp_path / "a" / "run.json").read_text())
    assert data["results"][0]["direction"] == data["settings"]["direction"] == "forward"
    assert data["results"][0]["tflops"] == 600.0 and data["environment"]["torch"] == torch.__version__
    pytest.importorskip("matplotlib")
    assert (tmp_path / "a" / "run.png").stat().st_size > 1000


def test_where_the_commit_is_from(monkeypatch):
    """The checkout; without one, as in images, which have no git either, the library that is installed."""
    given = {"git": "1234567-dirty", "record": SimpleNamespace(revision="7654321")}
    monkeypatch.setattr(result_file, "output_of", lambda argv, **_: given[argv[0]])
    monkeypatch.setattr(result_file, "find", lambda name: Path(name))
    monkeypatch.setattr(result_file, "read_info", lambda path: given["record"])
    assert result_file.commit() == "1234567-dirty"
    given["git"] = None
    assert result_file.commit() == "7654321"
    given["record"] = SimpleNamespace(revision="")
    assert result_file.commit() is None
    given["record"] = None
    assert result_file.commit() is None


@pytest.mark.parametrize("gpu_seconds, calls_made", [(1e-4, 1 + 5 * 100), (0.05, 1 + 5 * 3), (1.5, 1 + 5)])
def test_host_times_take_fewer_calls_of_long_kernels(gpu_seconds, calls_made, monkeypatch):
    """On a time that only launches, 30 us each, and waits for the GPU advance."""
    now, queued, calls = 0.0, 0, 0

    def launch() -> None:
        nonlocal now, queued, calls
        now, queued, calls = now + 3e-5, queued + 1, calls + 1

    def synchronize() -> None:
        nonlocal now, queued
        now, queued = now + queued * gpu_seconds, 0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert timing.host_us(launch) == pytest.approx(30.0)
    assert calls == calls_made


def test_blocks_of_a_long_document():
    case = masks.Case("varlen_block_causal", 5000, (4300, 700))
    want = dense(case)
    assert case.mask.area == want.sum() == 2048 * 2048 + 2048 * 4096 + 204 * 4300 + 700 * 700
    assert np.array_equal(case.mask.to_dense(), want)


def test_summary():
    got = timing.summary([float(x) for x in range(1, 22)])
    assert got["median_us"] == 11.0 and got["p10_us"] < 4 and got["p90_us"] > 18
    assert timing.summary([5.0]) == {"median_us": 5.0, "p10_us": 5.0, "p90_us": 5.0}
