# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards of the portable kernels, in both budgets of shared memory, to be run under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitized_portable.py

and with ``--tool synccheck``. Results are only held to be finite; ``test_ffa_portable.py`` compares them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from backward_oracle import make_dout, options_of
from forward_oracle import make_inputs
from test_ffa_backward_deterministic import CASES

from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native.families import family_of
from magi_attention.native.ffa import FfaLibrary

DIMS = ((64, 64), (128, 128), (72, 120), (256, 256))
MASKS = list(CASES)[:4]


def main() -> int:
    family = family_of(torch.cuda.get_device_capability(), portable=True)
    if family is None:
        print("There are no portable kernels for this GPU.")
        return 1
    library, count = FfaLibrary.ahead(family), 0
    for is_small in (False, True):
        library.use_small_tiles(is_small)
        ffa = FfaBackend(portable=True)  # plans belong to the tiles
        for name, dims, deterministic in product(MASKS, DIMS, (False, True)):
            x = make_inputs(0, CASES[name](333), 333, 333, (8, 2), dims, device="cuda")
            options = replace(options_of(x), deterministic=deterministic)
            out, lse, _ = ffa.forward_final(Operands(x.q, x.k, x.v, x.slices, options))
            grads = ffa.backward_final(BackwardOperands(make_dout(x), x.q, x.k, x.v, out, lse, x.slices, options))
            torch.cuda.synchronize()
            if not all(t.isfinite().all() for t in (out, grads.dq, grads.dk, grads.dv)):
                print(f"{name}, {dims}, deterministic {deterministic}, small {is_small}: not finite")
                return 1
            count += 1
    print(f"{count} calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
