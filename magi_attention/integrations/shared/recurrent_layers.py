# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model mix tokens other than by attention, and which of these compute by the plans of a batch.

Recurrent layers of transformers call functions of their module by name, with the arguments of the batch. Functions that
know plans are marked (``mark``); a layer knows plans if all functions that it mixes tokens by do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

# By what configs and classes call them.
MIXING_TYPES = ("linear_attention", "mamba", "conv", "recurrent", "rwkv")
_MIXING_CLASSES = ("Mamba", "GatedDelta", "DeltaNet", "DeltaAttention", "ShortConv", "Rwkv", "RWKV", "RecurrentBlock",
                   "LinearAttention")  # fmt: skip
MOST_FRAGMENTS = 8  # of a rank that passes states: as many as keep 8 ranks balanced to 2% (docs/dispatch.md)
_POOLED = (nn.LSTM, nn.GRU, nn.RNN, nn.Conv1d)
CONVOLUTION, FUSED = "causal_conv1d_fn", "mamba2_split_conv1d_scan_combined"
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"  # whose forward uses it calls transformers' attention interface
_MARK = "_magi_knows_plans"
Marked = TypeVar("Marked", bound=Callable[..., Any])


def mark(one: Marked, knows_plans: bool = True) -> Marked:
    """A function, a layer or a class of layers, which from now on counts as one that computes by plans; or else as one
    that mixes tokens in a way that is not known."""
    setattr(one, _MARK, knows_plans)
    return one


def is_marked(one: Any) -> bool:
    """Does it compute by plans?"""
    return getattr(one, _MARK, False)


def can_know_plans(layer: nn.Module) -> bool:
    """Is a layer of a class that knows plans, or mixes it tokens by functions which may: one of ``SCANS``, or a short
    convolution alone?"""
    if is_marked(layer):
        return True
    called = _called(layer)
    is_whole = any(name in called for name in SCANS) or "ShortConv" in type(layer).__name__
    return is_whole and CONVOLUTION in called


def knows_plans(layer: nn.Module) -> bool:
    """Is its class, or are all of these functions, such that do know plans?"""
    if is_marked(layer):
        return True
    called, scope = _called(layer), vars(sys.modules[type(layer).__module__])
    names = [name for name in (CONVOLUTION, FUSED, *SCANS) if name in called]
    return can_know_plans(layer) and all(is_marked(scope.get(name)) for name in names)


def _called(layer: nn.Module) -> set[str]:
    """Names that a layer's forward uses."""
    forward = inspect.unwrap(layer.forward)  # which libraries of kernels may have replaced
    return set(getattr(getattr(forward, "__code__", None), "co_names", ()))


def mixing_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and layer of all that mix tokens other than by attention, and do not know plans."""
    outer: list[str] = []  # layers whose parts are theirs
    for name, layer in model.named_modules():
        if any(name.startswith(f"{whole}.") for whole in outer):
            continue
        if can_know_plans(layer):
            outer.append(name)
            if not knows_plans(layer):
                yield name, layer
        elif hasattr(layer, _MARK):
            outer.append(name)
            yield name, layer
        elif _mixes(layer):
            yield name, layer


def _mixes(layer: nn.Module) -> bool:
    if isinstance(layer, _POOLED):
        return not (isinstance(layer, nn.Conv1d) and layer.kernel_size[0] == 1)
    is_named_so = any(word in type(layer).__name__ for word in _MIXING_CLASSES)
    # Some classes of attention, and of layers around a mixing one, have such names, too.
    return is_named_so and _ATTENTION not in _called(layer) and not any(map(_is_asked_itself, layer.modules()))


def _is_asked_itself(layer: nn.Module) -> bool:
    return hasattr(layer, _MARK) or can_know_plans(layer)


def has_known(model: nn.Module) -> bool:
    """Does any layer mix tokens by functions that know plans?"""
    return any(map(knows_plans, model.modules()))
