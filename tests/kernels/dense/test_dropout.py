# SPDX-License-Identifier: Apache-2.0
"""Attention dropout: its definition and both torch backends against float64. Kernels are emulated: test_ffa_fwd_on_cpu
and test_ffa_bwd_on_cpu."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_oracle import assert_same, dropout_weights, make_case, truth
from hypothesis import given, note, settings
from hypothesis import strategies as st

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels import AttnOptions, SdpaBackend, SdpaOnlineBackend
from magi_attention.kernels.dropout import Dropout, DropoutMask, dropout_of
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.testing.masks import random_slices

BACKENDS = (SdpaBackend(), SdpaOnlineBackend(), SdpaOnlineBackend(block_q=24, block_k=40))


def positions(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.choice(2**31 - 1, rows, replace=False).astype(np.int32)


def draw(seed: int, tq: int, tk: int, share: float, **kwargs):
    """A case of ``attn_oracle``, whose weights come from the definition, and the mask that backends get."""
    rng = np.random.default_rng(seed)
    case = make_case(seed, tq, tk, random_slices(rng, tq, tk, max_slices=6), **kwargs)
    q, k = positions(rng, tq), positions(rng, tk)
    number = int(rng.integers(-(2**63), 2**63 - 1))
    kept = dropout_weights(number, share, case.q.shape[1], q, k)
    return replace(case, kept=kept), DropoutMask(Dropout(share, number), torch.from_numpy(q), torch.from_numpy(k))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), share=st.sampled_from((0.1, 0.5, 0.97)), backend=st.sampled_from(BACKENDS),
    has_cap=st.booleans(), has_sink=st.booleans(),
)  # fmt: skip
def test_torch_backends(seed, share, backend, has_cap, has_sink):
    note(f"seed {seed}")
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    tq, tk = int(rng.integers(1, 90)), int(rng.integers(1, 90))
    sink = (2, 4) if has_sink else None
    case, mask = draw(seed, tq, tk, share, softcap=3.0 if has_cap else 0.0, sink_shape=sink)
    options = AttnOptions(case.scale, case.softcap, dropout_p=share, return_max_logits=True)
    part = backend.forward(Operands(case.q, case.k, case.v, case.slices, options, case.sink, mask))
    saved = (case.dout, case.q, case.k, case.v, part.out, part.lse)
    grads = backend.backward(BackwardOperands(*saved, case.slices, options, case.sink, dropout=mask))
    want = truth(case).tensors()
    for name, x in want.items():
        assert_same(name, getattr(grads if name[0] == "d" else part, name), x, 1e-11)


def test_shares_and_independence():
    """Over rows, columns, heads and seeds the right share goes; pairs, and rectangles of four, know nothing of one
    another."""
    share, n, heads = 0.3, 512, 4
    rows = torch.arange(n, dtype=torch.int32)
    stays = [DropoutMask(Dropout(share, seed), rows, rows).weights(heads) > 0 for seed in (1, 2)]
    x = stays[0].double() - (1 - share)
    deviation = (share * (1 - share)) ** 0.5

    def score(values: torch.Tensor, unit: float) -> float:
        """Largest of these means, in standard deviations."""
        return float(values.abs().max() / unit)

    assert score(x.mean((1, 2)), deviation / n) < 5
    assert score(x.mean((0, 2)), deviation / (heads * n) ** 0.5) < 5
    assert score(x.mean((0, 1)), deviation / (heads * n) ** 0.5) < 5
    square = deviation**2
    for shift in (1, 2, 64, 255):
        for other in (x.roll(shift, 1), x.roll(shift, 2), x.roll(1, 0), stays[1].double() - (1 - share)):
            assert score((x * other).mean((1, 2)), square / n) < 5, shift
        box = x * x.roll(shift, 1) * x.roll(shift, 2) * x.roll((shift, shift), (1, 2))
        assert score(box.mean((1, 2)), square**2 / n) < 5, shift


@pytest.mark.parametrize(
    ("p", "seed", "what"),
    [(-0.1, 1, "at least 0"), (1.0, 1, "below 1"), (float("nan"), 1, "below 1"), (0.1, None, "dropout_seed"),
     (0.1, 1.5, "integer"), ("much", 1, "number")],
)  # fmt: skip
def test_bad_dropouts(p, seed, what):
    with pytest.raises(ContractError, match=what):
        dropout_of(p, seed)


def test_no_dropout():
    assert dropout_of(0.0, None) is None and dropout_of(0, 3) is None


def test_what_does_not_fit():
    case, mask = draw(7, 20, 30, 0.5)
    args, good = (case.q, case.k, case.v, case.slices), AttnOptions(case.scale, dropout_p=0.5)
    bad = replace(mask, k_positions=mask.k_positions[1:]), replace(mask, q_positions=mask.q_positions.long())
    for wrong in bad:
        with pytest.raises(ContractError, match="_positions of the dropout"):
            SdpaBackend().forward(Operands(*args, good, dropout=wrong))
    for options, given_mask in ((good, None), (AttnOptions(case.scale), mask), (replace(good, dropout_p=0.4), mask)):
        with pytest.raises(ContractError, match="dropout_p"):
            SdpaOnlineBackend().forward(Operands(*args, options, dropout=given_mask))
    with pytest.raises((ContractError, UnsupportedError), match="at least 0"):
        AttnOptions(1.0, dropout_p=1.0)
