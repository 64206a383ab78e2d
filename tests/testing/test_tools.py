# SPDX-License-Identifier: Apache-2.0
"""Tolerances, references, parameterize, flags, filters, the brute-force dispatcher."""

import os
import sys
import unittest
from pathlib import Path

import numpy as np
import pytest
import torch

import magi_attention.testing as mt
from magi_attention.common import slices
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing import masks, precision
from magi_attention.testing.flag_generator import FlagCombGenerator
from magi_attention.testing.ref_attn import ref_attn_func

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "oracles"))
from attn_oracle import make_case, truth  # noqa: E402

# ---- precision --------------------------------------------------------------------------------------


def test_assert_close():
    a = torch.tensor([1.0, 2.0, -torch.inf, 4.0])
    precision.assert_close(a, a)
    precision.assert_close(a, a + torch.tensor([0.09, 0, 0, 0]), atol=0, rtol=0.1)
    b = a.clone()
    b[1], b[3] = 9, 5
    with pytest.raises(AssertionError, match="Mismatched elements: 2 / 4.*instead of 9") as error:
        precision.assert_close(a, b, 1e-3, 1e-3, mismatch_threshold=0.49, test_case="case")
    assert str(error.value).startswith("case") and precision.extract_mismatch_info(str(error.value)) == (
        2,
        4,
        0.5,
    )
    precision.assert_close(a, b, 1e-3, 1e-3, mismatch_threshold=0.5)
    for bad in (torch.nan, torch.inf, 0.0):
        c = a.clone()
        c[2] = bad
        with pytest.raises(AssertionError):
            precision.assert_close(c, a, 1.0, 1.0)
    with pytest.raises(AssertionError, match="Shapes"):
        precision.assert_close(a, a[:2])
    with pytest.raises(ValueError, match="Mismatched"):
        precision.extract_mismatch_info("all is well")
    try:
        torch.testing.assert_close(a, b)
    except AssertionError as theirs:
        assert precision.extract_mismatch_info(str(theirs)) == (2, 4, 0.5)


def test_norm_and_threshold():
    a, b = torch.tensor([1.0, 2.0, 3.0, -torch.inf]), torch.tensor([1.0, 2.5, 3.0, -torch.inf])
    assert precision.calc_inf_norm(a, b) == 0.5 and precision.calc_inf_norm(a[:0], b[:0]) == 0
    assert precision.calc_inf_norm(a, torch.full_like(a, torch.nan)) == float("inf")
    assert precision.extract_mismatch_threshold(a, b, 1e-3, 1e-3) == 0.5
    assert precision.extract_mismatch_threshold(a, b, 1e-3, 1e-3, 1.0) == 0.25
    assert precision.extract_mismatch_threshold(a, a, 0, 0, min_mismatch_thres=0.1) == 0.1
    assert precision.extract_mismatch_threshold(a + 1, b, 0, 0) == 0.75


# ---- reference attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend, online", [("sdpa", False), ("torch", False), ("torch", True)])
@pytest.mark.parametrize("sink_layout, softcap", [(None, 0.0), ("sh", 0.0), ("ssh", 0.7), (None, 0.5)])
def test_reference_attention(monkeypatch, seed, backend, online, sink_layout, softcap):
    monkeypatch.setattr("magi_attention.testing.ref_attn.ONLINE_BLOCK", 5)
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(1, 14, 2))
    shape = {"sh": (2, 4), "ssh": (tq, 2, 4)}.get(sink_layout)
    case = make_case(seed, tq, tk, masks.random_slices(rng, tq, tk), dims=(3, 5), softcap=softcap, sink_shape=shape)
    leaves = {name: getattr(case, name) for name in ("q", "k", "v", "sink") if getattr(case, name) is not None}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    out, meta = ref_attn_func(
        **leaves, mask=torch.from_numpy(slices.to_dense(case.slices.array, tq, tk)), sink_layout=case.sink_layout,
        softmax_scale=case.scale, softcap=softcap, backend=backend, online_softmax=online,
        return_lse=True, return_max_logits=True,
    )  # fmt: skip
    got = {"out": out, "lse": meta.lse, "max_logits": meta.max_logits}
    grads = torch.autograd.grad(out, list(leaves.values()), case.dout, allow_unused=True)
    got |= {f"d{name}": torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(leaves, grads)}
    want = truth(case).tensors()
    assert got.keys() == want.keys()
    for name, x in got.items():
        precision.assert_close(x, want[name], 1e-11, 1e-9)


def test_reference_options():
    q, k = torch.randn(3, 2, 4, dtype=torch.bfloat16), torch.randn(5, 1, 4, dtype=torch.bfloat16)
    mask = torch.ones(3, 5, dtype=torch.bool)
    out, meta = ref_attn_func(q, k, k, mask, high_precision=True, return_lse=True)
    assert out.dtype == torch.bfloat16 and meta.lse.dtype == torch.float64 and meta.max_logits is None
    out, meta = ref_attn_func(q, k, k, mask, return_lse=True)
    assert meta.lse.dtype == torch.float32 and meta.lse.shape == (3, 2)
    for kwargs, error in [
        ({"layout": "bshd"}, UnsupportedError),
        ({"backend": "x"}, ContractError),
        ({"sink": torch.zeros(1, 2, 4), "sink_layout": "shd"}, UnsupportedError),
    ]:
        with pytest.raises(error):
            ref_attn_func(q, k, k, mask, **kwargs)
    with pytest.raises(ContractError, match="mask"):
        ref_attn_func(q, k, k, mask[:2])


# ---- parameterize and environment -------------------------------------------------------------------


def test_parameterize_runs_all_combinations():
    seen = []

    @mt.parameterize("a", [1, 2])
    @mt.parameterize("b", "xy")
    def case(prefix, a, b):
        if b == "y" and a == 1:
            raise unittest.SkipTest("no")
        seen.append((prefix, a, b))

    case("p")
    assert seen == [("p", 1, "x"), ("p", 2, "x"), ("p", 2, "y")]


def test_parameterize_names_the_failing_case():
    class Picky(Exception):
        def __init__(self, a, b):
            super().__init__(a, b)

    @mt.parameterize("a", [1, 2])
    @mt.parameterize("b", [3, 4])
    def case(a, b, error=ValueError):
        if (a, b) == (2, 4):
            raise ValueError("boom")

    with pytest.raises(ValueError, match=r"boom\n  with b = 4\n  with a = 2"):
        case()

    @mt.parameterize("a", [7])
    def picky(a):
        raise Picky(1, 2)

    with pytest.raises(RuntimeError, match="Picky.*\n  with a = 7"):
        picky()

    @mt.parameterize("a", [1, 2])
    def skips(a):
        raise unittest.SkipTest("all")

    with pytest.raises(unittest.SkipTest):
        skips()


def test_parameterize_shares_cases_among_processes(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_PARAMETERIZE_RUN_IN_MP", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    runs = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        mt.parameterize("a", range(20))(lambda a, rank=rank: runs.append((rank, a)))()
    assert sorted(a for _, a in runs) == list(range(20)) and {rank for rank, _ in runs} == {0, 1, 2}


def test_switching_variables(monkeypatch):
    on, off = "MAGI_ATTENTION_CATGQA", "MAGI_ATTENTION_QO_COMM"
    monkeypatch.setenv(on, "before")
    monkeypatch.delenv(off, raising=False)
    restore = mt.switch_envvars([on, off], {on: True, off: False}, {on: "7"}, {off: "no"})
    assert (os.environ[on], os.environ[off]) == ("7", "no")
    restore()
    assert os.environ[on] == "before" and off not in os.environ
    with pytest.raises(ZeroDivisionError), mt.switch_envvar_context([on, off], enable=False):
        assert os.environ[on] == os.environ[off] == "0"
        raise ZeroDivisionError
    assert os.environ[on] == "before" and off not in os.environ

    @mt.switch_envvar_decorator(off, enable_value="yes")
    def inside():
        return os.environ[off]

    assert inside() == "yes" and off not in os.environ


def test_filters(monkeypatch):
    assert mt.should_run_world_size(3) and mt.should_run_test_case(num_heads=(8, 2), dtype="bf16")
    monkeypatch.setenv("MAGI_ATTENTION_TEST_WORLD_SIZE", "2, 4")
    monkeypatch.setenv("MAGI_ATTENTION_TEST_ATTN_CONFIG", "varlen_*")
    assert mt.should_run_world_size(4) and not mt.should_run_world_size(3)
    assert mt.should_run_attn_config("varlen_full") and not mt.should_run_attn_config("full")
    assert not mt.should_run_test_case(world_size=2, attn_config="full", backend="sdpa")
    for first in (2, 4):  # whether an earlier filter lets the case through or not
        with pytest.raises(ContractError, match="No variable filters test cases by 'colour'; use world_size, attn_"):
            mt.should_run_test_case(world_size=first, colour="red")

    class Case:
        world_size = 3

        @mt.skip_if_world_size_filtered
        def method(self):
            return "ran"

    with pytest.raises(unittest.SkipTest, match="3 ranks"):
        Case().method()
    Case.world_size = 2
    assert Case().method() == "ran"


# ---- flags ------------------------------------------------------------------------------------------


def take(generator, n):
    return [next(generator) for _ in range(n)]


def test_flag_strategies():
    flags = ["a", "b"]
    options = {"b": [1, 2, 3]}
    constant = FlagCombGenerator(flags, options, {"b": 2}, strategy="constant")
    assert take(constant, 3) == [{"a": False, "b": 2}] * 3
    every = [{"a": a, "b": b} for a in (False, True) for b in (1, 2, 3)]
    assert list(FlagCombGenerator(flags, options, strategy="sequential", cycle_times=2)) == every * 2
    drawn = list(FlagCombGenerator(flags, options, strategy="random", cycle_times=3))
    assert len(drawn) == 18 and all(comb in every for comb in drawn) and len({str(c) for c in drawn}) > 3
    assert drawn == list(FlagCombGenerator(flags, options, strategy="random", cycle_times=3)), "private seed"
    heuristic = FlagCombGenerator(["a", "b", "c"], options, groups=[("a", "c")])
    first = [
        {"a": False, "b": 1, "c": False},
        {"a": True, "b": 2, "c": True},
        {"a": True, "b": 1, "c": False},
        {"a": False, "b": 2, "c": False},
        {"a": False, "b": 3, "c": False},
        {"a": False, "b": 1, "c": True},
        {"a": True, "b": 1, "c": True},
    ]
    assert take(heuristic, 7) == first and len(take(heuristic, 30)) == 30
    assert list(FlagCombGenerator(["a", "b", "c"], options, groups=[("a", "c")], cycle_times=1)) == first
    assert FlagCombGenerator.to_test_case(first[0]) == "a=False, b=1, c=False"
    assert heuristic.is_comb_covered(first[3])
    assert not FlagCombGenerator(["a"]).is_comb_covered({"a": False})


def test_flags_can_be_gone_through_from_the_beginning():
    """Twice named flags count once, defaults come first, and loops do not use up what next() gives."""
    options, defaults = {"b": [1, 2, 3]}, {"a": True, "b": 2}
    generator = FlagCombGenerator(["a", "b", "a"], options, defaults, strategy="sequential", cycle_times=2)
    assert (generator.num_flags, generator.num_combs, generator.options["b"]) == (2, 6, [2, 1, 3])
    assert next(iter(generator)) == next(iter(generator)) == next(generator) == defaults
    assert next(reversed(generator)) == {"a": False, "b": 3}
    assert next(generator) == {"a": True, "b": 1}
    forwards, backwards = list(generator), list(generator.iter(reverse=True))
    assert len(forwards) == 12 and backwards == forwards[::-1]
    with pytest.raises(ContractError, match="reverse"):
        reversed(FlagCombGenerator(["a"]))


def test_next_valid_combination():
    generator = FlagCombGenerator(["a", "b"], strategy="sequential", cycle_times=1)
    needs_b = lambda comb, config: comb["b"] == config  # noqa: E731
    assert generator.get_next_valid_comb(True, needs_b) == {"a": False, "b": True}
    assert generator.get_next_valid_comb(False, needs_b) == {"a": False, "b": False}, "deferred, now valid"
    assert generator.get_next_valid_comb(True, needs_b) == {"a": True, "b": True}
    assert generator.is_comb_covered({"a": True, "b": True})
    with pytest.raises(RuntimeError, match="valid for 5"):
        FlagCombGenerator(["a", "b"]).get_next_valid_comb(5, lambda comb, config: False)
    rare = FlagCombGenerator(list("abcdefgh"))
    assert rare.get_next_valid_comb(None, lambda comb, _: sum(comb.values()) == 7 and not comb["e"])["e"] is False


def test_flag_mistakes():
    for bad in (
        lambda: FlagCombGenerator(["a"], strategy="x"),
        lambda: FlagCombGenerator(["a"], defaults={"a": 3}),
        lambda: FlagCombGenerator(["a"], groups=[("a", "z")]),
    ):
        with pytest.raises(ContractError):
            bad()


# ---- dispatcher -------------------------------------------------------------------------------------


def test_ground_truth_dispatcher():
    dispatcher = mt.GroundTruthDispatcher(np.tri(16), 2)
    assert dispatcher.chunk_areas() == [3, 7, 11, 15, 19, 23, 27, 31]
    parts = [[0, 3, 4, 7], [1, 2, 5, 6]]
    dispatcher.check_partitions(parts)
    assert dispatcher.rank_areas(parts) == [68, 68] and dispatcher.best_max_area(2) == 68
    assert dispatcher.position_ids(parts, 0) == [0, 1, 6, 7, 8, 9, 14, 15]
    assert dispatcher.position_ids(parts, 1) == [2, 3, 4, 5, 10, 11, 12, 13]
    x = torch.arange(32).reshape(16, 2)
    rows = [dispatcher.dispatch(x, parts, rank) for rank in range(2)]
    assert (dispatcher.undispatch(rows, parts) == x).all()
    with pytest.raises(ContractError, match="each once"):
        dispatcher.check_partitions([[0, 1], [1, 2]])
    uneven = mt.GroundTruthDispatcher(torch.ones(5, 3), 2)
    assert uneven.chunk_areas() == [6, 6, 3] and uneven.best_max_area(2) == 9
    assert mt.GroundTruthDispatcher(np.tri(4), 1).best_max_area(2, equal_counts=True) == 5
