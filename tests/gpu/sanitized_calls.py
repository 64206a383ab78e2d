# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards of all paths through the kernels, few of each, to be run under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitized_calls.py

and with ``--tool synccheck``. Results are only held to be finite; the tests of pytest compare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from backward_oracle import make_dout, options_of
from forward_oracle import make_inputs
from test_ffa_backward_deterministic import CASES

from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands, Grads, Operands
from magi_attention.native.planner.schedule import BwdSchedule, Split

DIMS = ((64, 64), (128, 128), (72, 120), (256, 256))
# About two work tiles for each SM, so that heads are not split, of tiles that can be split; and of L2 groups of which
# the last one is smaller.
MANY = (1337, (96, 24))
SECTIONS = (2100, (44, 11))
FORCED = (
    *(BwdSchedule(n, 0, stores, by_document) for n in (64, 80) for stores in (0, 1) for by_document in (0, 1)),
    *(BwdSchedule(80, 0, split=split) for split in (Split(0, 2, 4), Split(3, 9, 2), Split(0, 11, 4), Split(10, 11, 2))),
    *(BwdSchedule(n, 0, stores, direct_dq_store=True) for n in (64, 80) for stores in (False, True)),
)

Call = tuple[str, tuple[int, tuple[int, int]], tuple[int, int], dict, BwdSchedule | None]


def calls() -> Iterator[Call]:
    """Mask, tokens and heads, head dims, options, and the schedule that is forced."""
    for name in CASES:
        for deterministic in (False, True):
            for dims in DIMS:
                for shape in ((333, (8, 2)), (1000, (5, 1))):
                    yield name, shape, dims, {"deterministic": deterministic}, None
            for shape in (MANY, SECTIONS):
                yield name, shape, (128, 128), {"deterministic": deterministic, "sm_margin": 40}, None
        for schedule in FORCED:
            if schedule.first_writer or schedule == BwdSchedule(80, 0, by_document=True):
                yield name, MANY, (128, 128), {}, schedule
            if not schedule.first_writer:
                yield name, MANY, (128, 128), {"deterministic": True}, schedule
            if schedule.direct_dq_store and schedule.block_m == 64:
                for dims in DIMS:
                    yield name, (777, (8, 2)), dims, {"deterministic": not schedule.first_writer}, schedule
        for options in ({"softcap": 20.0}, {"sink_shape": (2, 8)}, {"dtype": torch.float16}, {"into": True}):
            yield name, (777, (8, 2)), (128, 128), options, None


def run(ffa: FfaBackend, call: Call) -> None:
    name, (total, heads), dims, options, schedule = call
    of_inputs = {n: options[n] for n in ("softcap", "sink_shape", "dtype") if n in options}
    x = make_inputs(0, CASES[name](total), total, total, heads, dims, **of_inputs)
    of_call = {n: options[n] for n in ("deterministic", "sm_margin") if n in options}
    attn, dout = replace(options_of(x), **of_call), make_dout(x)
    ffa_backward.select_schedule = select_schedule if schedule is None else lambda *_: schedule
    out, lse, _ = ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, attn, x.sink))
    operands = BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, attn, x.sink)
    for _ in range(2):  # what the first makes of the plan is kept for the second
        if "into" in options:
            into = Grads(*(torch.ones(t.shape, device=t.device) for t in (x.q, x.k, x.v)))
            ffa.backward(operands, into)
            found = into
        else:
            found = ffa.backward_final(operands)
        torch.cuda.synchronize()
    for gradient in ("dq", "dk", "dv"):
        assert bool(torch.isfinite(getattr(found, gradient)).all()), (call, gradient)


def main() -> None:
    ffa, count = FfaBackend(), 0
    for call in calls():
        run(ffa, call)
        count += 1
    print(f"{count} calls")


if __name__ == "__main__":
    main()
