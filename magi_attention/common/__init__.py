# SPDX-License-Identifier: Apache-2.0
"""Value types: ranges, slices, masks. No torch at import, no process groups, no CUDA."""

from __future__ import annotations

from magi_attention.common import enum
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.env.general import is_cpp_backend_enable
from magi_attention.errors import RangeError

USE_CPP_BACKEND = False  # the value types are Python in every build

__all__ = [
    "USE_CPP_BACKEND",
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "RangeError",
    "enum",
    "is_cpp_backend_enable",
]
