# SPDX-License-Identifier: Apache-2.0
"""Published value types, and what else the published ``magi_attention.common`` has: rectangles, masks, protocols."""

from magi_attention.compat.values import jit
from magi_attention.compat.values.attn_mask import AttnMask
from magi_attention.compat.values.rectangle import AttnRectangle
from magi_attention.compat.values.rectangles import AttnRectangles

__all__ = ["AttnMask", "AttnRectangle", "AttnRectangles", "jit"]
