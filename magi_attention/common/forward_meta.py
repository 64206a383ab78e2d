# SPDX-License-Identifier: Apache-2.0
"""``AttnForwardMeta``: what an attention forward returns beside its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class AttnForwardMeta:
    """``lse_TH``: natural log-sum-exp, float32 ``(tokens, q heads)``, -inf for rows with nothing to attend.
    ``max_logits_H``: largest scaled logit per q head, float32, or None if not asked for.
    """

    lse: torch.Tensor | None
    max_logits: torch.Tensor | None = None
