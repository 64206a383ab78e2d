# SPDX-License-Identifier: Apache-2.0
"""``sm_margin``: the multiprocessors that the backward leaves to others are free for as long as it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from backward_oracle import make_dout, options_of
from forward_oracle import make_inputs

from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]

MARGIN, SLEEP_CYCLES = 16, 1_500_000  # of an H100 about 0.8 ms, in which the host launches and the kernel begins
# Each of its last kernels: of m-blocks of 80, of work lists, where the first writer stores, in deterministic mode.
CASES = {
    "plain": (masks.full(16384), (16, 2), False),
    "work list": (masks.full(5120), (64, 8), False),
    "first writer": (masks.sliding_window(32768, 512), (64, 8), False),
    "deterministic": (masks.full(16384), (16, 2), True),
}


def share_of_time(attend) -> float:
    """When a product on another stream ends, which is launched while attention runs: of the time that this takes."""
    factor, side = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    start, product, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(2):  # the first makes plans and workspaces
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        attend()
        end.record()
        with torch.cuda.stream(side):
            torch.mm(factor, factor)
            product.record()
    torch.cuda.synchronize()
    return start.elapsed_time(product) / start.elapsed_time(end)


@pytest.mark.parametrize("name", CASES)
def test_a_margin_is_free(name):
    slices, heads, is_ordered = CASES[name]
    total, ffa = int(slices.array[:, 1].max()), FfaBackend()
    x = make_inputs(0, slices.array, total, total, heads, (128, 128), dtype=torch.bfloat16, device="cuda")
    dout, options = make_dout(x), replace(options_of(x), deterministic=is_ordered)
    out, lse, _ = ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, options))
    shares = []
    for margin in (MARGIN, 0):
        some = replace(options, sm_margin=margin)
        operands = BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, some)
        backward = partial(ffa.backward_final, operands)
        shares.append(share_of_time(backward))
    print(f"{name}: with a margin {shares[0]:.2f}, without {shares[1]:.2f}")
    assert shares[0] < 0.8 < shares[1], shares
