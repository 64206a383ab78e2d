# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation="magi"``: what a layer of transformers calls, by the plans of a batch; and torch's attention
where whole sequences are on each rank, in evaluation and generation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from magi_attention.api import attend
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.packing import LayerPlans
from magi_attention.integrations.shared.layer_kinds import limits_of

NAME = "magi"
# Models that choose a class of their own by the name of the attention, and would end in a KeyError.
_TABLES = {"falcon": "FALCON", "gpt_neo": "GPT_NEO", "gptj": "GPTJ"}


class _Whole:
    """Whether each rank has whole sequences: how many ``full_sequences`` blocks are open."""

    depth = 0


_WHOLE = _Whole()


@contextmanager
def full_sequences() -> Iterator[None]:
    """Forwards in the block have no plans: each rank computes whole sequences of its own, by torch's attention."""
    _WHOLE.depth += 1
    try:
        yield
    finally:
        _WHOLE.depth -= 1


class _OwnAttention(torch.nn.Module):
    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        raise UnsupportedError(
            f"Models of type {config.model_type!r} have attention of their own, which does not go through the "
            f"attention interface of transformers; {NAME!r} cannot replace it. Train another model over ranks, or this "
            "one on one rank with attn_implementation='sdpa'."
        )


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation=name`` known to transformers."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, LazyMask)
    for model, table in _TABLES.items():
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        getattr(module, f"{table}_ATTENTION_CLASSES", {}).setdefault(name, _OwnAttention)


class LazyMask:
    """What transformers wants to know of a mask. Plans say it already, so no (T, T) tensor is made for them."""

    def __init__(self, **wanted: Any) -> None:
        self._wanted = wanted
        self._made: dict[Any, torch.Tensor | None] = {}

    def tensor(self, make: Any) -> torch.Tensor | None:
        """As ``make``, sdpa_mask or eager_mask, makes it; once for all layers."""
        if make not in self._made:
            self._made[make] = make(**self._wanted)
        return self._made[make]

    def refuse_padding(self) -> None:
        padding = self._wanted.get("attention_mask")
        if padding is not None and not padding.is_meta and not bool(padding.all()):
            raise ContractError(
                "The batch has plans and an attention_mask that leaves tokens out; PackingCollator drops such tokens "
                "by the attention_mask of each example, so give it there."
            )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LazyMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    magi_plans: LayerPlans | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a layer of transformers calls: query (1, Hq, T, D), key and value (1, Hk, T, D); out (1, T, Hq, D).

    ``magi_plans`` comes with the batch, as an argument of the model. ``s_aux`` (Hq,) are sinks. Without plans it is
    torch's attention, of any batch: in evaluation without gradients, so in ``generate``; on one process; and in
    ``full_sequences``.

    Raises:
        ContractError: there are no plans where a rank may hold a part of a sequence, or more than one sequence.
        UnsupportedError: dropout, a bias by position, or a layer that is not causal.
    """
    if magi_plans is None:
        _check_whole(module, others)
        extra = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "sliding_window": sliding_window}
        given = {name: x for name, x in extra.items() if x is not None}
        return _by_torch(module, query, key, value, attention_mask, scaling, dropout, {**others, **given})
    if isinstance(attention_mask, LazyMask):
        attention_mask.refuse_padding()
    elif attention_mask is not None and not query.is_meta:
        raise ContractError(
            f"Attention 'magi' got a mask of shape {tuple(attention_mask.shape)}, and plans say the mask. Leave "
            f"attention_mask out of the batch; if it has none, {type(module).__name__} makes one by itself and cannot "
            "be used with this release of transformers."
        )
    if query.shape[0] != 1:
        raise ContractError(f"A batch has {query.shape[0]} rows; PackingCollator packs all of them into one.")
    if dropout:
        raise UnsupportedError(
            f"Attention dropout is {dropout}; set it to 0 in the model's config: attention_dropout, attn_pdrop or "
            "attention_probs_dropout_prob, whichever it has."
        )
    if position_bias is not None:
        raise UnsupportedError(f"{type(module).__name__} adds a bias by position; take a model with rotary embeddings.")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedError(f"{type(module).__name__} is not causal; the plans of PackingCollator are.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out, _ = attend(
        q, k, v, magi_plans.of(*limits_of(module, sliding_window)), magi_plans.group, softmax_scale=scaling,
        softcap=softcap or 0.0, sink=None if s_aux is None else s_aux[None].to(torch.float32),
    )  # fmt: skip
    return out[None], None


def _check_whole(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """A forgotten collator must not train each rank on its own tokens."""
    if _WHOLE.depth or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if not torch.is_grad_enabled() and not (module.training and _is_checkpointed()):
        return
    raise ContractError(
        f"Attention 'magi' got no plans in a training step of {dist.get_world_size()} processes; it got "
        f"{', '.join(sorted(others)) or 'no further arguments'}. If the batch has no 'magi_plans', make it by "
        "PackingCollator (ContextParallelTrainer does). If it has, the model does not hand its keyword arguments on to "
        "its layers and cannot be used. If each process is to train on whole sequences of its own, call the model "
        "inside `with full_sequences():`."
    )


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint runs this forward: its reentrant form has no gradients in training."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _by_torch(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
    scaling: float | None, dropout: float, others: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """torch's fused attention, or the model's own where that has no soft cap, no sinks and no weights to return."""
    needs_eager = any(others.get(name) is not None for name in ("softcap", "s_aux")) or others.get("output_attentions")
    attend_here = sdpa_attention_forward
    if needs_eager:
        attend_here = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if attend_here is None:
            raise UnsupportedError(
                f"{type(module).__name__} has soft caps or sinks and no eager attention; give it plans."
            )
    if isinstance(mask, LazyMask):
        mask = None if query.is_meta else mask.tensor(eager_mask if needs_eager else sdpa_mask)
    return attend_here(module, query, key, value, mask, scaling=scaling, dropout=dropout, **others)
