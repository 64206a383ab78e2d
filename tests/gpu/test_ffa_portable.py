# SPDX-License-Identifier: Apache-2.0
"""The portable kernels, with the tiles for GPUs of much and of little shared memory: the tests of the Hopper kernels
once more, but for those of their schedule."""

from __future__ import annotations

import numpy as np
import pytest
import test_ffa_backward
import test_ffa_backward_deterministic
import test_ffa_backward_use
import test_ffa_forward
import test_ffa_split
import torch
from backward_oracle import assert_grads, make_dout, truth
from forward_oracle import make_inputs
from test_ffa_backward import explicit_backend_in_poisoned_memory  # noqa: F401
from test_ffa_backward_deterministic import assert_same_bits
from test_ffa_forward import explicit_backend  # noqa: F401

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.registry import default_registry
from magi_attention.native.families import family_of
from magi_attention.native.ffa import FfaLibrary
from magi_attention.testing import masks

DEVICE = "cuda"
OF_HOPPER = {"test_uneven_documents_split_their_heads"}


def portable_library() -> FfaLibrary | str:
    """That of this GPU, or why there is none."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    family = family_of(torch.cuda.get_device_capability(), portable=True)
    if family is None:
        return "there are no portable kernels for this GPU"
    try:
        return FfaLibrary.ahead(family)
    except UnsupportedError as reason:
        return str(reason)


LIBRARY = portable_library()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))]

MODULES = (
    test_ffa_forward, test_ffa_split, test_ffa_backward, test_ffa_backward_use, test_ffa_backward_deterministic,
)  # fmt: skip
for module in MODULES:
    kind = module.__name__.removeprefix("test_ffa_")
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_") and name not in OF_HOPPER}
    globals().update({f"test_{kind}_{name[5:]}": test for name, test in tests.items()})


@pytest.fixture(autouse=True, params=("much", "little"))
def portable_kernels(request, monkeypatch):
    """Shared memory of a CTA: as much as this GPU has, or 99 KB."""
    monkeypatch.setenv("MAGI_ATTENTION_PORTABLE_KERNELS", "1")
    LIBRARY.use_small_tiles(request.param == "little")
    default_registry.cache_clear()
    yield
    LIBRARY.use_small_tiles(False)
    default_registry.cache_clear()


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_one_tile_adds_to_a_block_from_several_segments(dim):
    """In order, a block is handed on when the last of them has been added."""
    rows = [(0, 700, k, k + 40, kind) for k, kind in zip(range(0, 600, 60), (0, 1, 2, 3) * 3)]
    x = make_inputs(3, np.array(rows), 700, 640, (8, 2), (dim, dim), device=DEVICE)
    dout = make_dout(x)
    first = test_ffa_backward.differentiate(x, dout, deterministic=True)
    assert_grads(x, first, truth(x, dout), dim)
    for _ in range(10):
        assert_same_bits(test_ffa_backward.differentiate(x, dout, deterministic=True), first, dim)


def test_tiles_that_skip_each_others_blocks():
    """In order, the tile before is looked for beyond 32 others that do not visit the block."""
    total, step = 128 * 80, 128
    rows = [(0, total, 0, step, 0)] + [(q, q + step, q, q + step, 0) for q in range(step, total, step)]
    x = make_inputs(4, masks.SliceTable(np.array(rows)), total, total, (2, 1), (64, 64), device=DEVICE)
    dout = make_dout(x)
    found = [test_ffa_backward.differentiate(x, dout, deterministic=True) for _ in range(5)]
    for number, again in enumerate(found[1:]):
        assert_same_bits(again, found[0], number)
    default = test_ffa_backward.differentiate(x, dout)
    error = (found[0].dq.double() - default.dq.double()).abs().max()
    assert error <= 2**-7 * default.dq.abs().max() and torch.equal(found[0].dv, default.dv)
