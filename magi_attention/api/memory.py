# SPDX-License-Identifier: Apache-2.0
"""The longest context that some GPUs hold, by ``Plan.memory``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from magi_attention.api.plan import make_plan
from magi_attention.common.mask import Mask
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.meta.predict.model_memory import TrainingSetup, longest
from magi_attention.meta.predict.model_shape import ModelShape

RESERVED = 0.06  # of a GPU: CUDA and NCCL, and what the allocator cannot use
_STEP, _MOST = 1 << 14, 1 << 27


def longest_context(
    shape: ModelShape,
    gpus: int,
    gigabytes: float,
    setup: TrainingSetup | None = None,
    *,
    mask_of: Callable[[int], Mask] = Mask.causal,
    reserved: float = RESERVED,
) -> int:
    """Tokens of the longest sequence, a multiple of 16,384, that ``gpus`` context-parallel ranks train on; 0 if none.

    ``gigabytes``: of one GPU, 1e9 bytes each, of which the share ``reserved`` is left to CUDA, NCCL and the allocator.
    ``mask_of(tokens)``: the mask of a sequence. Parameters are sharded over ``setup.shards`` or these GPUs. Plans
    are made for a dozen lengths, which takes some seconds for millions of tokens. Sequences above 134M tokens are not
    tried.
    """
    gpus = as_int(gpus, "gpus", at_least=1)
    if not gigabytes > 0 or not 0 <= reserved < 1:
        raise ContractError(f"gigabytes is {gigabytes} and reserved {reserved}; give a size, and a share below 1.")
    limit = gigabytes * 1e9 * (1 - reserved)
    setup = setup or TrainingSetup()
    setup = setup if setup.shards is not None else replace(setup, shards=gpus)

    def fits(tokens: int) -> bool:
        return make_plan(mask_of(tokens), gpus, check=False).memory(shape, setup).peak_bytes <= limit

    return longest(fits, _STEP, _MOST)
