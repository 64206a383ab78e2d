# SPDX-License-Identifier: Apache-2.0
"""Tolerances of low-precision results, by comparison with a plain low-precision reference.

With ``test`` (ours), ``lowp`` (a reference in the test dtype) and ``ref`` (a float64 reference):

1. largest error: ``|test - ref| <= max(min_norm, NORM_RTOL_RATIO * |lowp - ref|)``;
2. elements: ``assert_close(test, ref, atol, rtol)``, where the allowed share of mismatches is
   ``clamp(MISMATCH_THRES_RATIO * share(lowp vs ref), min, MAX_MISMATCH_THRES)``.
"""

from __future__ import annotations

import re

import torch

EPSILON = 1e-8
MISMATCH_THRES_RATIO = 2.0
MAX_MISMATCH_THRES = 0.75
NORM_RTOL_RATIO = 2.0

# One GPU: dense 16-bit matrix FLOP/s, the share of it that matmuls reach, NVLink bytes per second and direction, and
# the share of them that all-to-alls reach. InfiniBand NDR: bytes per second and direction.
H100_TFLOPS_16 = 989.5e12
H100_MATMUL_MFU = 0.7
H100_NVLINK_BANDWIDTH = 450e9
H100_NVLINK_A2A_BWU = 0.6
H800_TFLOPS_16 = 989.5e12
H800_NVLINK_BANDWIDTH = 200e9
H800_NVLINK_A2A_BWU = 0.6
IB_BANDWIDTH = 50e9


def calc_inf_norm(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference, in float64; equal infinities differ by 0, NaN makes it infinite."""
    return float(_difference(a, b).max()) if a.numel() else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        raise AssertionError(f"Shapes differ: {tuple(a.shape)} and {tuple(b.shape)}.")
    a, b = a.detach().double(), b.detach().double()
    difference = torch.where(a == b, 0.0, (a - b).abs())
    return torch.where(difference.isnan(), torch.inf, difference)


def _mismatches(a: torch.Tensor, b: torch.Tensor, atol: float, rtol: float) -> torch.Tensor:
    allowed = atol + rtol * b.detach().double().abs().nan_to_num(posinf=0.0)
    return _difference(a, b) > allowed


def assert_close(
    a: torch.Tensor,
    b: torch.Tensor,
    atol: float = EPSILON,
    rtol: float = EPSILON,
    mismatch_threshold: float = 0.0,
    test_case: str = "",
    print_rank: int = 0,
) -> None:
    """At most ``mismatch_threshold`` of the elements differ by more than ``atol + rtol * |b|``.

    ``print_rank`` is accepted for compatibility; the message is in the exception of every rank.

    Raises:
        AssertionError: with "Mismatched elements: x / y", which ``extract_mismatch_info`` reads.
    """
    bad = _mismatches(a, b, atol, rtol)
    count, total = int(bad.sum()), bad.numel()
    if count <= mismatch_threshold * total:
        return
    difference = _difference(a, b)
    where = int(difference.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), a.shape))
    raise AssertionError(
        f"{test_case or 'Tensors'}: Mismatched elements: {count} / {total} ({100 * count / total:.3f}%), "
        f"allowed {100 * mismatch_threshold:.3f}%; greatest difference {float(difference.max()):.3e} at "
        f"{place}: {float(a.reshape(-1)[where]):.6e} instead of {float(b.reshape(-1)[where]):.6e} "
        f"(atol {atol:g}, rtol {rtol:g})."
    )


def extract_mismatch_info(error_msg: str) -> tuple[int, int, float]:
    """(mismatched elements, elements, their ratio) from a message of ``assert_close``, ours or torch's."""
    found = re.search(r"Mismatched elements: (\d+) / (\d+)", error_msg)
    if found is None:
        raise ValueError(f"There is no 'Mismatched elements: x / y' in {error_msg!r}.")
    count, total = int(found[1]), int(found[2])
    return count, total, count / total


def extract_mismatch_threshold(
    actual: torch.Tensor,
    expected: torch.Tensor,
    atol: float,
    rtol: float,
    mismatch_thres_ratio: float = MISMATCH_THRES_RATIO,
    min_mismatch_thres: float = 0.0,
    max_mismatch_thres: float = MAX_MISMATCH_THRES,
) -> float:
    """The allowed share for ``assert_close``: ratio times the share of mismatches of ``actual``, clamped."""
    bad = _mismatches(actual, expected, atol, rtol)
    share = float(bad.double().mean()) if bad.numel() else 0.0
    return min(max(mismatch_thres_ratio * share, min_mismatch_thres), max_mismatch_thres)
