# SPDX-License-Identifier: Apache-2.0
"""What ``ContextParallelTrainer`` refuses when it is made."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.shared.layer_kinds import text_config
from magi_attention.integrations.transformers.interface import NAME
from magi_attention.integrations.validate import of_forward, of_interface, of_layers

# Classes whose compute_loss is known to take the next token's labels and to divide by num_items_in_batch.
_KNOWN_LOSSES = {"transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer"}
_REMEDIES = {
    "GRPOTrainer": "PrefixTreeCollator of magi_attention.integrations.prefix_trees gives log-probabilities of groups",
    "RLOOTrainer": "PrefixTreeCollator of magi_attention.integrations.prefix_trees gives log-probabilities of groups",
}


def check_started(world: int) -> None:
    """``ContractError`` if the Trainer knows of ``world`` processes, and others were started beside this one."""
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != world:
        raise ContractError(
            f"{started} processes were started, and the Trainer knows of {world}, so each would train alone; "
            "on CPUs say use_cpu=True in TrainingArguments."
        )


def check_trainer(trainer: Any, model: Any, cp_size: int) -> None:
    """Raises ``ContractError`` for settings to change, ``UnsupportedError`` for what ranks cannot share."""
    args = trainer.args
    _check_model(trainer, model, cp_size)
    if args.n_gpu > 1:
        raise ContractError("One process drives several GPUs; start one for each by torchrun or accelerate launch.")
    if not args.average_tokens_across_devices:
        raise ContractError("Ranks hold parts of a sequence; leave average_tokens_across_devices at True.")
    if trainer.label_smoother is not None:
        raise UnsupportedError("label_smoothing_factor shifts labels within a rank; leave it at 0.")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.tp_enabled or parallel.sp_enabled):
        raise UnsupportedError("ParallelismConfig has tp_size or sp_size above 1; leave both at 1.")


def check_class(trainer: type) -> None:
    """Refuses a class whose loss is computed from batches of its own, or may shift labels within a rank."""
    for kind in trainer.__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__.startswith("magi_attention.") or "compute_loss" not in vars(kind) or name in _KNOWN_LOSSES:
            continue
        if kind.__module__.startswith("trl."):
            remedy = _REMEDIES.get(kind.__name__, "SFTTrainer is the one that works")
            raise UnsupportedError(
                f"{kind.__name__} of TRL makes batches and losses of its own, which are not those of ranks that share "
                f"sequences; {remedy}."
            )
        if not getattr(trainer, "computes_loss_by_shard", False) and issubclass(kind, Trainer):
            raise UnsupportedError(
                f"{kind.__name__} has a compute_loss of its own. Labels are those of the next token already, and a "
                "rank has a part of them. If it neither shifts them nor takes a mean, but divides a sum by "
                "num_items_in_batch and multiplies by the number of processes, say computes_loss_by_shard = True in "
                "the class; else give the loss as compute_loss_func."
            )


def _check_model(trainer: Any, model: Any, cp_size: int) -> None:
    for finding in of_interface(model):
        raise UnsupportedError(f"{finding.text} {finding.remedy}")
    if (name := model.config._attn_implementation) != NAME:
        raise ContractError(
            f"The model's attention is {name!r}; call register() and load it with attn_implementation={NAME!r}."
        )
    if hasattr(model.config, "vision_config") or hasattr(model.config, "audio_config"):
        raise UnsupportedError(
            f"{type(model).__name__} has a part for images or sound, whose rows are not tokens of a rank; train its "
            "language model alone (AutoModelForCausalLM), or use attend with a plan in a loop of your own."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} has an encoder; documents are packed for decoders.")
    for finding in (*of_layers(model, text_config(model.config), cp_size), *of_forward(model)):
        if finding.level == "error":
            raise UnsupportedError(f"{finding.text} {finding.remedy}")
    if not trainer.model_accepts_loss_kwargs:
        raise UnsupportedError(f"{type(model).__name__} takes no num_items_in_batch, by which ranks share a loss.")
