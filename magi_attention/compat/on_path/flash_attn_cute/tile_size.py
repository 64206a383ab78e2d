# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of kernels that are not here."""

from typing import Any, NoReturn

from magi_attention.errors import UnsupportedError


def get_tile_sizes_by_backend(*args: Any, **kwargs: Any) -> NoReturn:
    """Not here: kernels of this build choose their tiles themselves."""
    raise UnsupportedError("Kernels choose their tiles themselves; give FA4AttnArg no tile sizes.")
