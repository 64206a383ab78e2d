# SPDX-License-Identifier: Apache-2.0
"""Metas: the parts of a plan in the published form."""

from magi_attention.api.keys.dispatch_meta import DispatchMeta
from magi_attention.compat.metas.calc_meta import AttnArg, CalcMeta, FA4AttnArg
from magi_attention.compat.metas.comm_meta import (
    A2AVBasedGroupCollectiveArg,
    CommMeta,
    GroupCollectiveArg,
    NativeGroupCollectiveArg,
)

__all__ = [
    "A2AVBasedGroupCollectiveArg",
    "AttnArg",
    "CalcMeta",
    "CommMeta",
    "DispatchMeta",
    "FA4AttnArg",
    "GroupCollectiveArg",
    "NativeGroupCollectiveArg",
]
