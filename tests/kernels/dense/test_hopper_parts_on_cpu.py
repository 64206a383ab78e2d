# SPDX-License-Identifier: Apache-2.0
"""The CPU's stand-in for the instructions of Hopper: a kernel that loads, multiplies, stores to shared memory and to
memory gives the product, and the mistakes that a kernel can make are found."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hopper_library import aligned, at

SOURCE = Path(__file__).with_name("hopper_parts_on_cpu.cpp")
MISTAKES = {  # what the kernel leaves out, and what is said then
    1: "has not called fence_async_proxy",
    2: "ends before its multiplications",
    3: "A deadlock",
    4: "ends before its bulk stores have read",
    5: "wgmma without a wgmma_fence",
    6: "changes registers of A",
    7: "There is no initialised mbarrier",
    8: "more than 1 arrivals",
    9: "some lanes of a warp",
    10: "mbar_init_fence was not called",
    11: "without a __syncwarp between them",
    12: "ends before its loads have arrived",
    13: "since registers of A were written",
}


def product(library, a_major: int, b_major: int, registers: int, seed: int, mistake: int = 0):
    """What went wrong or None, the product of random operands (64, 64), added twice, and its truth."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    stored_a, stored_b = aligned(a.T if a_major else a), aligned(b.T if b_major else b)
    out = aligned(torch.zeros(64, 64, dtype=torch.bfloat16))
    library.multiply.restype = ctypes.c_char_p
    error = library.multiply(
        at(stored_a), at(stored_b), at(out), a_major, b_major, registers, mistake, ctypes.c_uint64(seed)
    )
    return error and error.decode(), out, 2 * a.double() @ b.double().T


@pytest.mark.parametrize(
    "a_major, b_major, registers", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1)]
)
def test_products(library, a_major, b_major, registers):
    """Other widths and dtypes are those of the attention kernels."""
    for seed in range(3):
        error, out, truth = product(library, a_major, b_major, registers, seed)
        assert error is None, error
        torch.testing.assert_close(out.double(), truth, rtol=0.01, atol=0.01, msg=f"{seed=}")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(library, mistake):
    """Not with each seed: what is not waited for may have happened already."""
    errors = [product(library, 0, 0, 1, seed, mistake)[0] for seed in range(12)]
    assert sum(MISTAKES[mistake] in (error or "") for error in errors) >= 3, errors


@pytest.mark.parametrize("mistake", (20, 21))
def test_what_comes_too_early_is_nan(library, mistake):
    """Tiles that have not arrived, and rows that other warps have not written yet."""
    found = [product(library, 0, 0, 0, seed, mistake) for seed in range(12)]
    assert sum(error is not None or bool(out.isnan().any()) for error, out, _ in found) >= 3


@pytest.mark.parametrize("waits", (0, 1))
def test_a_kernel_that_begins_before_another_has_ended(library, waits):
    """It sees what that one writes if it waits for it, and else not always."""
    library.run_pair.restype = ctypes.c_char_p
    seen = torch.full((12, 4), -7, dtype=torch.int32)
    for seed, row in enumerate(seen):
        value = torch.zeros(1, dtype=torch.int32)
        error = library.run_pair(at(value), at(row), waits, ctypes.c_uint64(seed))
        assert error is None, error.decode()
    assert set(seen.flatten().tolist()) == ({1} if waits else {0, 1})
