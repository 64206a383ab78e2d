# SPDX-License-Identifier: Apache-2.0
"""Value types: ranges, slices, rectangles, masks. No torch at import, no process groups, no CUDA."""

from __future__ import annotations

from magi_attention.common import enum, jit
from magi_attention.common.attn_mask import AttnMask
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.rectangle import AttnRectangle
from magi_attention.common.rectangles import AttnRectangles
from magi_attention.env.general import is_cpp_backend_enable
from magi_attention.errors import RangeError

USE_CPP_BACKEND = False  # the value types are Python in every build

__all__ = [
    "USE_CPP_BACKEND",
    "AttnForwardMeta",
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnRectangle",
    "AttnRectangles",
    "RangeError",
    "enum",
    "is_cpp_backend_enable",
    "jit",
]
