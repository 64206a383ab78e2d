# SPDX-License-Identifier: Apache-2.0
"""A loss function that shifts labels by itself, over tokens whose labels are those of the next token already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from magi_attention.integrations.packing import IGNORE_INDEX


class LossOfOwnShift:
    """``compute_loss_func`` of a Trainer, over ranks.

    A rank's tokens do not follow one another, so the shift inside ``function`` would pair strangers. One row more
    undoes it: logits (1, T + 1, V) with a row of zeros last, labels (1, T + 1) with -100 first. ``logits[:, :-1]`` and
    ``labels[:, 1:]`` are then what belongs together. It costs a copy of the logits.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def __call__(self, outputs: Any, labels: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        if labels is None:
            return self.function(outputs, labels, **kwargs)
        outputs = copy.copy(outputs)
        outputs["logits"] = F.pad(outputs["logits"], (0, 0, 0, 1))
        return self.function(outputs, F.pad(labels, (1, 0), value=IGNORE_INDEX), **kwargs)
