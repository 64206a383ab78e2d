# SPDX-License-Identifier: Apache-2.0
"""What of the kernel benchmark needs no GPU: its masks, its reference, its table, plot and command line."""

from __future__ import annotations

import kernel
import masks
import numpy as np
import peers
import pytest
import reference
import torch
from result_files import load

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
