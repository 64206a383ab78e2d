# SPDX-License-Identifier: Apache-2.0
"""The sum of the cross entropy over many tokens, by a library that never has the logits of all of them.

* ``torch``: ``linear_cross_entropy`` with its options, from torch 2.13 on;
* ``liger``: ``LigerFusedLinearCrossEntropyLoss`` of ``liger-kernel``, for GPUs, which chooses its chunks itself;
* ``checkpointed``: torch's cross entropy of checkpointed chunks, in every torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOSSES = ("torch", "liger", "checkpointed")
# (rows (T, C), weight of the head (vocabulary, C), labels (T,), -100 for none) -> a number in float32
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_loss(name: str | None, chunk: int) -> tuple[Loss, str]:
    """The loss called ``name``, None for torch's or what an older torch has, and a sentence that says which it is."""
    is_in_torch = hasattr(F, "linear_cross_entropy")
    if name == "torch" and not is_in_torch:
        raise SystemExit(
            f"--loss torch: torch {torch.__version__} has no linear_cross_entropy; install torch 2.13 or later, or "
            "give --loss checkpointed."
        )
    if name == "torch" or (name is None and is_in_torch):
        return _by_torch(chunk), f"The loss is torch's linear_cross_entropy, {chunk:,} tokens at a time."
    if name == "liger":
        return _by_liger(), "The loss is Liger's fused linear cross entropy."
    reason = "" if name else f", because torch {torch.__version__} has no linear_cross_entropy"
    return _checkpointed(chunk), f"The loss is checkpointed, {chunk:,} tokens at a time{reason}."


def _by_torch(chunk: int) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def loss_sum(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # why "none": torch 2.13 adds up "sum" in the dtype of the rows, which in bf16 loses percents of the loss
        return F.linear_cross_entropy(rows, weight, labels, reduction="none", options=options).float().sum()

    return loss_sum


def _by_liger() -> Loss:
    if importlib.util.find_spec("liger_kernel") is None:
        raise SystemExit("--loss liger needs Liger: pip install liger-kernel, or give --loss torch or checkpointed.")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda rows, weight, labels: fused(weight, rows, labels).float()


def _checkpointed(chunk: int) -> Loss:
    def loss_sum(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        def of_chunk(x: Tensor, of_x: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x, weight).float(), of_x, reduction="sum")

        chunks = zip(rows.split(chunk), labels.split(chunk))
        return torch.stack([checkpoint(of_chunk, *one, use_reentrant=False) for one in chunks]).sum()

    return loss_sum
