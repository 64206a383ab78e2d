# SPDX-License-Identifier: Apache-2.0
"""Calls with a gradient in a row, on a simulated kernel library: what one of them prepared serves the next, unless
something has changed on which the result depends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_oracle import make_case, truth
from ffa_simulator import close, tensors

from magi_attention.common.mask import Mask
from magi_attention.errors import ContractError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.native import abi

TOKENS, DIM = 32, 16
BACKEND, SANITY = "MAGI_ATTENTION_KERNEL_BACKEND", "MAGI_ATTENTION_SANITY_CHECK"


class Calls:
    """Settings that change one at a time, and the call that they make."""

    def __init__(self, simulator, runtime, monkeypatch, rng: np.random.Generator) -> None:
        self.simulator, self.runtime, self.monkeypatch, self.rng = simulator, runtime, monkeypatch, rng
        self.heads, self.sink, self.options, self.environment = (4, 2), None, {}, {}
        self.mask = self.random_mask()
        self.pending = None  # the backward of the last call

    def random_mask(self):
        middle = int(self.rng.integers(1, TOKENS))
        return tensors(Mask.varlen([0, middle, TOKENS], causal=bool(self.rng.integers(2))).slices)

    def change(self) -> str:
        rng, pick = self.rng, lambda *values: values[self.rng.integers(len(values))]
        what = pick("edit", "mask", "heads", "sink", "deterministic", "softcap", "scale", "margin", BACKEND, SANITY)
        if what == "edit":
            for mine, new in zip(self.mask, self.random_mask()):
                mine.copy_(new)
        elif what == "mask":
            self.mask = self.random_mask()
        elif what == "heads":
            self.heads, self.sink = ((4, 2), (4, 4), (4, 1), (2, 2))[rng.integers(4)], None
        elif what == "sink":
            self.sink = pick(None, (2,), (3,), (TOKENS, 2))
        elif what == "deterministic":
            self.options["deterministic"] = not self.options.get("deterministic", False)
        elif what == "softcap":
            self.options["softcap"] = pick(0.0, 0.7, 2.0)
        elif what == "scale":
            self.options["softmax_scale"] = pick(None, 0.2, 0.4, torch.tensor(0.3))
        elif what == "margin":
            self.options["sm_margin"] = pick(0, 2)
        else:
            self.environment[what] = pick(None, "ffa", "sdpa") if what == BACKEND else pick(None, "1")
            value = self.environment[what]
            self.monkeypatch.delenv(what, raising=False) if value is None else self.monkeypatch.setenv(what, value)
        self.runtime.has_caught_up = bool(rng.integers(2))
        return what

    def run(self) -> None:
        """A forward; its backward is ``pending``."""
        slices, options, counts = table_from_tensors(*self.mask), dict(self.options), len(self.simulator.calls)
        shape = None if self.sink is None else (*self.sink, self.heads[0])
        seed, exact = int(self.rng.integers(1000)), torch.bfloat16
        case = make_case(seed, TOKENS, TOKENS, slices.array, self.heads, (DIM, DIM), options.get("softcap", 0.0), shape,
                         representable=exact)  # fmt: skip
        scale = options.get("softmax_scale")
        case.scale = DIM**-0.5 if scale is None else float(scale)
        *inputs, dout = case.cast(exact)
        inputs = [x.requires_grad_() for x in (*inputs, *([] if case.sink is None else [case.sink.float()]))]
        sink = {} if case.sink is None else {"sink": inputs[3], "sink_layout": case.sink_layout}
        out, meta = flex_flash_attn_func(*inputs[:3], *self.mask, **options, **sink)
        want, is_ffa = truth(case), self.environment.get(BACKEND) != "sdpa"
        close(out.detach(), want.out, 2e-2)
        close(meta.lse.detach(), want.lse, 1e-4)
        assert len(self.simulator.calls) == counts + is_ffa

        def backward() -> None:
            ran = len(self.simulator.backward_calls)
            grads = torch.autograd.grad(out, inputs, dout)
            for got, right in zip(grads, (want.dq, want.dk, want.dv, want.dsink)):
                close(got, right, 4e-2)
            assert len(self.simulator.backward_calls) == ran + is_ffa
            if is_ffa:
                params, is_fixed = self.simulator.backward_calls[-1], options.get("deterministic", False)
                assert (params.dq_mode == abi.DQ_DETERMINISTIC) == is_fixed
                assert params.sm_margin == options.get("sm_margin", 0)

        self.pending = backward


@pytest.mark.parametrize("seed", range(8))
def test_every_change_is_noticed(public, monkeypatch, seed):
    """Each backward runs behind the forward of the next call, so it must go by its own forward: by the options and the
    environment of that time, and never over a mask that was edited since."""
    ffa, simulator = public
    calls = Calls(simulator, ffa.runtime, monkeypatch, np.random.default_rng(seed))
    calls.run()
    for _ in range(30):
        backward, what = calls.pending, calls.change()
        calls.run()
        if what == "edit":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward()
        else:
            backward()
        again = calls.pending
        calls.run()  # nothing has changed
        again()


def test_checks_are_asked_again_for_layouts_that_did_not_pass(public, monkeypatch):
    q, k, v = (torch.randn(TOKENS, heads, DIM).bfloat16().requires_grad_() for heads in (4, 2, 2))
    mask, sink = tensors(Mask.varlen([0, 9, TOKENS]).slices), torch.zeros(2, 4)
    for given in (sink, None):
        flex_flash_attn_func(q, k, v, *mask, sink=given)
    for _ in range(2):
        for bad, text in (
            ((q[:, :3], k, v, *mask), "multiple"), ((q.half(), k, v, *mask), "cast all three"),
            ((q, k, v[:8], *mask), "same tokens"), ((q, k[..., :8], v, *mask), "same head dim"),
            ((q, k, v, mask[0][:1], *mask[1:]), "one k range"),
            ((q, k, v, *mask[:2], mask[2].float()), "attn_type_map is"), ((q, k, v, mask[0]), "k_ranges is missing"),
        ):  # fmt: skip
            with pytest.raises(ContractError, match=text):
                flex_flash_attn_func(*bad)
        with pytest.raises(ContractError, match="sink has shape"):
            flex_flash_attn_func(q, k, v, *mask, sink=sink[:, :3])
        with pytest.raises(ContractError, match="layout"):
            flex_flash_attn_func(q, k, v, *mask, sink=sink, sink_layout="ssh")
    monkeypatch.setenv(SANITY, "1")
    mask.q_ranges.copy_(torch.tensor([[0, TOKENS], [0, TOKENS]]))
    mask.k_ranges.copy_(mask.q_ranges)
    with pytest.raises(ContractError, match="overlap"):
        flex_flash_attn_func(q, k, v, *mask, sink=sink)
