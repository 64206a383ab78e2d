# SPDX-License-Identifier: Apache-2.0
"""The helper where the published package looks for it."""

from flash_attn_cute.tile_size import get_tile_sizes_by_backend

__all__ = ["get_tile_sizes_by_backend"]
