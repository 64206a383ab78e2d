# SPDX-License-Identifier: Apache-2.0
"""What is called of the wheel flash-attn-4. Two of its functions are not public, so ``magi_attention[fa4]`` pins it."""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.fa4.blocks import BlockSize
from magi_attention.native import install

HINT = f"run `{install.needs('fa4')}`"
_FORWARD = ("softmax_scale", "softcap", "pack_gqa", "mask_mod", "block_sparse_tensors", "return_lse", "aux_tensors")
_BACKWARD = ("softmax_scale", "softcap", "mask_mod", "block_sparse_tensors", "aux_tensors")


class Lists(NamedTuple):
    """Lists of blocks on a GPU, int32: counts (1, 1, rows) and indices (1, 1, rows, longest row)."""

    counts: torch.Tensor
    indices: torch.Tensor


class Wheel(NamedTuple):
    """Its two functions, its type for lists of blocks, and our ``mask_mod`` for it."""

    forward: Any
    backward: Any
    block_lists: Any
    mask_mod_of: Any

    def mask_of(self, endpoints: torch.Tensor, lists: tuple[Lists, Lists], size: BlockSize) -> dict[str, Any]:
        """Arguments of ``forward`` or ``backward`` that say the mask; ``lists`` are of partial and of full blocks."""
        partial, full = lists
        blocks = self.block_lists(
            mask_block_cnt=partial.counts, mask_block_idx=partial.indices, full_block_cnt=full.counts,
            full_block_idx=full.indices, block_size=tuple(size),
        )  # fmt: skip
        mask_mod = self.mask_mod_of(len(endpoints))
        return {"mask_mod": mask_mod, "aux_tensors": [endpoints], "block_sparse_tensors": blocks}


@lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether the wheel is there; it is not loaded, which takes seconds."""
    try:
        return find_spec("flash_attn.cute") is not None and find_spec("cutlass") is not None
    except (ImportError, OSError, RuntimeError, ValueError):
        return False


@lru_cache(maxsize=1)
def load_wheel() -> Wheel:
    """Loads it, with the kernels that are compiled ahead in place of its own table of kernels.

    Raises:
        UnsupportedError: it does not load, or has other functions.
    """
    try:
        from flash_attn.cute import interface
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        from magi_attention.kernels.fa4 import objects
        from magi_attention.kernels.fa4.mask_mod import mask_mod_of
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(f"flash-attn-4 does not load ({error}); {HINT}.") from error
    wheel = Wheel(interface._flash_attn_fwd, interface._flash_attn_bwd, BlockSparseTensorsTorch, mask_mod_of)
    for function, names in ((wheel.forward, _FORWARD), (wheel.backward, _BACKWARD)):
        missing = set(names) - set(inspect.signature(function).parameters)
        if missing:
            raise UnsupportedError(f"This flash-attn-4 has no {', '.join(sorted(missing))}; {HINT}, which pins it.")
    objects.install(interface)
    return wheel


__all__ = ["HINT", "Lists", "Wheel", "is_installed", "load_wheel"]
