# SPDX-License-Identifier: Apache-2.0
# compatibility alias
"""``magi_attention.common.range_op``, where the published package has the range operators."""

from magi_attention.kernels.range_ops import range_fill_, range_gather, range_reduce

__all__ = ["range_fill_", "range_gather", "range_reduce"]
