# SPDX-License-Identifier: Apache-2.0
"""A call of ``flex_flash_attn_func`` that is known, on a simulated kernel library."""

from __future__ import annotations

import ctypes

from ffa_simulator import inputs, tensors

from magi_attention.common.mask import Mask
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func

KNOWN = flex_flash_attn_func.known_calls


class Case:
    """One call that ran once, so that ``find`` knows it."""

    def __init__(self, simulator, **options) -> None:
        self.simulator = simulator
        self.q, self.k, self.v = inputs(32, 32)
        self.mask = tensors(Mask.varlen([0, 9, 32], causal=True).slices)
        self.options = options
        self.want = flex_flash_attn_func(self.q, self.k, self.v, *self.mask, **options)

    def find(self, **changes):
        q_ranges, k_ranges, types = self.mask
        call = {
            "q": self.q, "k": self.k, "v": self.v, "q_ranges": q_ranges, "k_ranges": k_ranges,
            "attn_type_map": types, **self.options, **changes,
        }  # fmt: skip
        return KNOWN.find(**call)


def quick_case(public, monkeypatch) -> Case:
    """One whose launch does nothing, and whose device is asked by builtin functions, as on a GPU."""
    ffa, simulator = public
    for name, ask in (("stream", (8).__add__), ("current_device", (-1).__int__), ("is_capturing", bool)):
        monkeypatch.setattr(ffa.runtime, name, ask, raising=False)  # stream 7 of device -1
    launch = ctypes.pythonapi.PyErr_Occurred  # gives 0, whatever it is given
    monkeypatch.setattr(simulator, "forward_address", ctypes.cast(launch, ctypes.c_void_p).value)
    return Case(simulator)
