# SPDX-License-Identifier: Apache-2.0
"""Floating-point types by width."""

from __future__ import annotations

import torch

from magi_attention.errors import ContractError


def fp_dtype_bits(dtype: torch.dtype) -> int:
    """Width in bits; ``ContractError`` unless floating point."""
    if not dtype.is_floating_point:
        raise ContractError(f"{dtype} is no floating-point type; give for example torch.bfloat16.")
    return torch.finfo(dtype).bits


def is_fp_dtype_at_least(tensor: torch.Tensor, lowest_precision: torch.dtype) -> bool:
    return fp_dtype_bits(tensor.dtype) >= fp_dtype_bits(lowest_precision)


def to_higher_fp_dtype(tensor: torch.Tensor, lowest_precision: torch.dtype) -> torch.Tensor:
    """The tensor, cast to ``lowest_precision`` if it is narrower."""
    return tensor if is_fp_dtype_at_least(tensor, lowest_precision) else tensor.to(lowest_precision)


def max_fp_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest; of equally wide ones the first."""
    return max(dtypes, key=fp_dtype_bits)


def to_triton_dtype(dtype: torch.dtype):
    """The triton type of the same name; needs triton, which is imported here.

    Raises:
        ContractError: triton has no such type.
    """
    import triton.language as tl

    names = {
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
        torch.float32: "float32",
        torch.float64: "float64",
        torch.int8: "int8",
        torch.int16: "int16",
        torch.int32: "int32",
        torch.int64: "int64",
        torch.uint8: "uint8",
        torch.bool: "int1",
    }
    if dtype not in names:
        raise ContractError(f"triton has no type for {dtype}; cast the tensor first.")
    return getattr(tl, names[dtype])
