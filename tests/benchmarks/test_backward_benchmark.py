# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark of gradients, without a GPU: its reference, its checks, its calls and what it reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import kernel
import masks
import peers
import peers_backward
import pytest
import reference
import torch
import torch._functorch.config as functorch

from magi_attention.kernels import AttnOptions, SdpaOnlineBackend
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.testing.ref_attn import ref_attn_func

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class StandIn(SdpaOnlineBackend):
    """The PyTorch kernels with the calls of the CUDA backend; counts them."""

    def __init__(self, scale_error: float = 1.0) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.scale_error = scale_error
        self._prepared = {}
        self._backward = SimpleNamespace(_prepared=self._prepared)

    def forward_final(self, x):
        self.calls.append("forward")
        part = self.forward(x)
        return part.out, part.lse, None

    def backward_final(self, x):
        self.calls.append("backward")
        call = SimpleNamespace(options=x.options, workspace_like=torch.zeros(1).expand(1234))
        self._prepared[id(x.options)] = call
        grads = self.backward(x)
        grads.dk *= self.scale_error
        return grads


def dense_peer(q, k, v, case):
    """A peer that autograd can differentiate: attention by a dense mask."""
    seen = torch.from_numpy(case.mask.to_dense())
    return lambda: ref_attn_func(q, k, v, seen, backend="torch")[0]


def inputs(case, dtype=torch.float32):
    return kernel.make_inputs(case, (4, 2), 16, dtype, "cpu", has_dout=True)


@pytest.mark.parametrize("name", masks.NAMES)
def test_reference_gradients(name):
    case = masks.make_case(name, 2100, sample=2)
    q, k, v, dout = kernel.make_inputs(case, (2, 1), 16, torch.float32, "cpu", has_dout=True)
    ours = StandIn()
    out, lse, _ = ours.forward_final(Operands(q, k, v, case.mask.slices, AttnOptions(0.25)))
    got_lse, got_delta = reference.row_statistics(case, q, k, v, dout, chunk_bytes=2**22)  # 249 rows
    torch.testing.assert_close(got_lse, lse)
    torch.testing.assert_close(got_delta, (out * dout).sum(-1), atol=1e-4, rtol=1e-4)
    grads = ours.backward_final(BackwardOperands(dout, q, k, v, out, lse, case.mask.slices, AttnOptions(0.25)))
    check = reference.BackwardCheck(case, q, k, v, dout)
    errors = check((grads.dq, grads.dk, grads.dv))
    assert list(errors) == ["dq", "dk", "dv"] and max(errors.values()) < 1e-5
    for i, which in enumerate(errors):
        bad = [grads.dq, grads.dk, grads.dv]
        bad[i] = bad[i] * 1.03
        assert {n for n, e in check(bad).items() if e > check.tolerance} == {which}
    with pytest.raises(ValueError, match="dk is"):
        check((grads.dq, grads.dk[:, :0], grads.dv))


@pytest.fixture(autouse=True)
def donated_buffer_restored():
    before = functorch.donated_buffer
    yield
    functorch.donated_buffer = before


@pytest.mark.parametrize("is_both", [False, True])
@pytest.mark.parametrize("name", ["full", "varlen_causal"])
def test_calls_of_all_kinds_give_the_gradients_again_and_again(name, is_both, monkeypatch):
    ours = StandIn()
    monkeypatch.setattr(peers_backward, "our_backend", lambda: ours)
    case = masks.make_case(name, 300, 1)
    makers = peers_backward.gradient_makers({"magi_host": peers._ours_host, "dense": dense_peer}, is_both)
    results = {n: kernel.Result(name, 300, n, direction="backward") for n in makers}
    calls = kernel.prepare(case, inputs(case), makers, results)
    assert list(calls) == ["magi_host", "magi_det", "dense"]
    assert calls["magi_host"].workspace_bytes == 1234
    for result in results.values():
        assert result.reason is None and result.error == max(result.errors.values()) < 1e-5
        assert set(result.errors) == {"dq", "dk", "dv"}
    ours.calls.clear()
    for call in calls.values():
        first, second = call(), call()
        assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert ours.calls == (["forward", "backward"] if is_both else ["backward"]) * 4  # magi_host and magi_det


def test_wrong_and_failing_gradients_are_not_timed(monkeypatch):
    def no_memory(q, k, v, case):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB\nmore lines")

    def half(q, k, v, case):
        run = dense_peer(q, k, v.detach(), case)
        return lambda: run() + 0.5 * (dense_peer(q.detach(), k.detach(), v, case)() - run().detach())

    monkeypatch.setattr(peers_backward, "our_backend", lambda: StandIn(1.05))
    case = masks.make_case("causal", 64)
    forwards = {
        "magi_host": peers._ours_host,
        "none": no_memory,
        "half": half,
        "dense": dense_peer,
        "cudnn": peers._flash_attention,
    }
    makers = peers_backward.gradient_makers(forwards, False)
    results = {n: kernel.Result("causal", 64, n) for n in makers}
    assert list(kernel.prepare(case, inputs(case), makers, results)) == ["dense"]
    assert results["magi_host"].reason.startswith("wrong: relative error 0.05 of dk")
    assert results["half"].reason.startswith("wrong: relative error 0.5 of dv")
    assert results["none"].reason == "OutOfMemoryError: Tried to allocate 2.00 GiB"
    assert results["cudnn"].reason.startswith("TypeError")


def test_single_draws_and_what_a_file_says(monkeypatch, tmp_path, capsys):
    def result(name: str, *samples: float, mask: str = "varlen_full") -> kernel.Result:
        return kernel.Result(mask, 4096, name, tflops=sum(samples) / len(samples), samples=list(samples))

    results = [result("magi", 400.0, 600.0), result("flex", 200.0, 400.0), kernel.Result("varlen_full", 4096, "fa4")]
    results += [result("magi", 500.0, mask="full"), result("flex", 250.0, mask="full")]
    want = "varlen_full 4K, 2 draws, mean of ratios: / flex 1.75 (1.50 to 2.00)"
    assert kernel.by_draws(results, ["magi", "flex", "fa4"]) == [want]  # means would have 1.67; one draw has no others
    text = kernel.table(results, ["magi", "flex", "fa4"])
    assert text.splitlines()[3].split()[:6] == ["varlen_full", "4K", "500", "300", "-", "0.0"] and want in text
    assert "1.67" in text
    monkeypatch.setattr(kernel, "draw", lambda *_: True)
    options = kernel.make_parser().parse_args([])
    kernel.save(results, options, tmp_path / "run")
    assert kernel.main(["--show", str(tmp_path / "run.json")]) == 0
    shown = capsys.readouterr().out
    assert text in shown and f"torch {torch.__version__}" in shown


def test_what_is_no_record_is_said(tmp_path):
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "list.json").write_text("[]")
    others = [BENCHMARKS / "results" / "range_ops_h100.json", tmp_path]
    for file in (tmp_path / "missing.json", tmp_path / "text.json", tmp_path / "list.json", *others):
        with pytest.raises(SystemExit, match="is no file that --out of this benchmark wrote"):
            kernel.show(file)


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "results").glob("ffa_*.json")), ids=lambda f: f.stem)
def test_records_can_be_shown(file):
    assert "Attention" in kernel.show(file) and "magi" in kernel.show(file)
