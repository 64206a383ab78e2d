# SPDX-License-Identifier: Apache-2.0
"""Ground truth of the extensions: masked softmax with sinks in float64, by the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "functional"))
import oracle  # noqa: E402


def dense_attention(q, k, v, allowed, scale, softcap=0.0, sink=None):
    """``(out (Tq, Hq, Dv), lse (Tq, Hq))``; ``allowed`` (Hq or 1, Tq, Tk) bool; ``sink`` (Tq or 1, S, Hq)."""
    return oracle.dense_attention(q, k, v, allowed, scale, softcap, sink)[:2]


def assert_equal_gradients(got, want, leaves, dout, names, tolerance=1e-10):
    """Outputs ``got`` and ``want`` and their gradients with respect to ``leaves``, which both were made from."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(got, leaves, dout)
    theirs = torch.autograd.grad(want, leaves, dout.to(want.dtype))
    for name, a, b in zip(names, ours, theirs):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"d{n}: {text}")
