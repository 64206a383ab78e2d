# SPDX-License-Identifier: Apache-2.0
"""Metas: the parts of a plan in the published form."""

from magi_attention.meta.collection.calc_meta import AttnArg, CalcMeta, FA4AttnArg
from magi_attention.meta.collection.comm_meta import A2AVBasedGroupCollectiveArg, CommMeta, GroupCollectiveArg
from magi_attention.meta.collection.dispatch_meta import DispatchMeta

__all__ = [
    "A2AVBasedGroupCollectiveArg",
    "AttnArg",
    "CalcMeta",
    "CommMeta",
    "DispatchMeta",
    "FA4AttnArg",
    "GroupCollectiveArg",
]
