# SPDX-License-Identifier: Apache-2.0
"""The published names of ``functional.flex_flash_attn`` besides the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from magi_attention.compat.extension import start_event, stop_event
from magi_attention.env import general
from magi_attention.errors import UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.rows.merge import merge_ranges

__all__ = ["FlexFlashAttnFunc", "maybe_contiguous", "maybe_profile_ffa_ctx", "merge_ranges", "profile_mode"]

profile_mode = general.is_profile_mode_enable()  # at import, as there


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` with its last dimension contiguous, as FlashAttention's helper of that name."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


@contextmanager
def maybe_profile_ffa_ctx(event_name: str) -> Iterator[None]:
    """In profile mode, the time within is the interval ``event_name`` of ``magi_attn_ext``."""
    if profile_mode:
        start_event(event_name)
    yield
    if profile_mode:
        stop_event(event_name)


_FLEX = inspect.signature(flex_flash_attn_func).parameters
# The published order: these first, without defaults; then the rest of ours; then what index attention took.
_FIRST = ("q", "k", "v", "sink", "sink_layout", "q_ranges", "k_ranges", "attn_type_map")
_NOT_THERE = {*_FIRST, "index_attn_indices", "q_block_size", "k_block_size"}
_INDEX_ATTN = ("index_attn_indices_2d", "index_attn_max_topk")
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PUBLISHED = inspect.Signature(
    [
        *(_FLEX[name].replace(kind=_EITHER, default=inspect.Parameter.empty) for name in _FIRST),
        *(x.replace(kind=_EITHER) for name, x in _FLEX.items() if name not in _NOT_THERE),
        *(inspect.Parameter(name, _EITHER, default=None) for name in _INDEX_ATTN),
    ]
)


class FlexFlashAttnFunc:
    """``apply`` takes the arguments of the published autograd function in its order.

    The function here is a custom op; ``forward`` and ``backward`` of a ``torch.autograd.Function`` do not exist.
    """

    @staticmethod
    def apply(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(out, lse, max_logits or None)``; see ``flex_flash_attn_func``. ``TypeError`` for other arguments."""
        given = _PUBLISHED.bind(*args, **kwargs).arguments
        given.pop("index_attn_max_topk", None)
        if given.pop("index_attn", False) or given.pop("index_attn_indices_2d", None) is not None:
            raise UnsupportedError(
                "Index attention goes by flex_flash_attn_func(..., index_attn_indices=...); call it."
            )
        out, meta = flex_flash_attn_func(**given)
        return out, meta.lse, meta.max_logits


FlexFlashAttnFunc.apply.__signature__ = _PUBLISHED  # type: ignore[attr-defined]
