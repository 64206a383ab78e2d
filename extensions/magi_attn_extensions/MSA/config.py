# SPDX-License-Identifier: Apache-2.0
"""What a caller of MSA chooses, gives and gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from magi_attention.errors import ContractError, UnsupportedError


class MsaKernelBackend(Enum):
    """Whose rules hold: those of the published ``msa_v1`` kernels, which are no part of this package."""

    MSAV1 = "msa_v1"


BLOCK = 128  # keys of one block with MSAV1


@dataclass(frozen=True)
class MsaConfig:
    """How blocks are selected. Every field has its published name; the defaults are what MiniMax-M3 uses.

    ``topk_blocks`` blocks are selected, the first ``init_blocks`` of the document and the query's own and the
    ``local_blocks`` - 1 before it always. ``softmax_scale`` None is ``D ** -0.5``. ``score_in_fp32`` False forms scores
    in the dtype of ``index_q``. ``high_precision_reduce`` sends keys and values and sums their gradients over the ranks
    in float32, not in their dtype. With ``deterministic`` gradients are the same bits on every run. Without effect:
    ``indexer_softmax_scale``, as a positive factor does not change which scores are best.

    ``UnsupportedError`` for ``kl_loss_coeff`` and ``lse_loss_coeff`` other than 0: the indexer learns nothing here.
    """

    kernel_backend: MsaKernelBackend = MsaKernelBackend.MSAV1
    softmax_scale: float | None = None
    indexer_softmax_scale: float | None = None
    init_blocks: int = 0
    local_blocks: int = 1
    topk_blocks: int = 16
    kl_loss_coeff: float = 0.0
    lse_loss_coeff: float = 0.0
    score_in_fp32: bool = True
    deterministic: bool = False
    high_precision_reduce: bool = False

    def __post_init__(self) -> None:
        if self.kl_loss_coeff or self.lse_loss_coeff:
            raise UnsupportedError(
                "kl_loss_coeff and lse_loss_coeff must be 0: no loss of the indexer is computed. Freeze its "
                "parameters, or train it by a loss of your own on index_q and index_k."
            )
        if self.indexer_softmax_scale is not None and not self.indexer_softmax_scale > 0:
            raise ContractError(f"indexer_softmax_scale is {self.indexer_softmax_scale}; give a positive number.")
        if self.topk_blocks < 1 or min(self.init_blocks, self.local_blocks) < 0:
            raise ContractError("topk_blocks must be at least 1, init_blocks and local_blocks at least 0.")


@dataclass(frozen=True)
class MsaV1Inputs:
    """This rank's rows, dispatched: q (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv), index_q (T, Hk, Di), index_k (T, 1, Di).

    Any floating dtype. Gradients flow to q, k and v; index_q and index_k only select.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor


@dataclass(frozen=True)
class MsaOutput:
    """``output`` (T, Hq, Dv): this rank's rows, in q's dtype."""

    output: torch.Tensor
