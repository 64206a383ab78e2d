# SPDX-License-Identifier: Apache-2.0
"""``validate``: says before training what of a model will not work over context-parallel ranks, and what to change.

for finding in validate(model, mesh):
    print(finding)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from magi_attention.api import AttentionCheck
from magi_attention.env.snapshot import RuntimeFlags, check_flag_comb
from magi_attention.errors import ContractError, MagiError, UnsupportedError
from magi_attention.integrations.packing import PackingCollator
from magi_attention.integrations.shared.layer_kinds import chunks_of, parts_without_text, text_config, windows_of
from magi_attention.integrations.shared.recurrent_layers import MIXING_TYPES, can_know_plans, has_known, mixing_layers
from magi_attention.kernels import AttnOptions, Problem, default_registry

_FRAMEWORKS = ("megatron", "torchtitan")  # whose layers that mix tokens are replaced by ours in a spec


@dataclass(frozen=True)
class Finding:
    """``level`` is "error" for what is wrong or refused, "warning" for what is slow or needs care."""

    level: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text} {self.remedy}"


def validate(
    model: nn.Module, mesh: Any = None, config: Any = None, *, dtype: torch.dtype | None = None, cp_dim: str = "cp"
) -> list[Finding]:
    """What will not work, errors first; empty if nothing was found.

    ``model`` may be on the meta device. ``config`` is by default the model's: any object with the attribute names of
    transformers; what it lacks is not looked at. ``mesh`` is a DeviceMesh with a dimension ``cp_dim``, or None for one
    rank. ``dtype`` is what attention will compute in, by default that of the parameters.
    """
    config = getattr(model, "config", None) if config is None else config
    text = text_config(config)
    cp_size = 1
    found: list[Finding] = []
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if cp_dim in names:
            cp_size = mesh.size(names.index(cp_dim))
        else:
            found.append(Finding("error", f"The mesh has dimensions {tuple(names)}, none is {cp_dim!r}.",
                                 "Name one so, or give cp_dim=."))  # fmt: skip
    found += _of_settings()
    found += of_interface(model)
    found += of_layers(model, text, cp_size)
    if text is not None:
        found += _of_attention(text)
        found += _of_kernels(model, text, dtype)
    if not any(finding.level == "error" for finding in found):
        found += of_forward(model)
    return sorted(dict.fromkeys(found), key=lambda finding: finding.level != "error")


def _of_settings() -> Iterator[Finding]:
    try:
        check_flag_comb(RuntimeFlags.from_env())
    except MagiError as error:
        yield Finding("error", str(error), "`magi env --set` lists what is set.")


def of_interface(model: nn.Module) -> Iterator[Finding]:
    """A model of transformers whose layers do not take their attention from its interface."""
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        yield Finding("error", f"{type(model).__name__} has attention of its own, which does not go through the "
                      "attention interface of transformers.", "Train another model over ranks.")  # fmt: skip


def of_forward(model: nn.Module) -> Iterator[Finding]:
    """Runs a model of transformers on the meta device, where nothing is computed: does each layer call attention?"""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return
    config = copy.deepcopy(model.config)
    batch = PackingCollator(windows=windows_of(config), chunks=chunks_of(config))([{"input_ids": [1] * 8}])
    plans, ids = batch["magi_plans"], batch["input_ids"].to("meta")
    try:
        with torch.device("meta"):
            unfilled = type(model)(config).to(torch.bfloat16)  # which grouped products of experts want
        with AttentionCheck(unfilled, exclude=parts_without_text(unfilled))(*plans.all()):
            # a mask of ones, as transformers else looks at position ids for packed documents
            unfilled(input_ids=ids, attention_mask=torch.ones_like(ids), magi_plans=plans, use_cache=False)
    except (ContractError, UnsupportedError) as error:
        yield Finding("error", str(error), "The first step of training would end with this.")
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        said = str(error).split("\n")[0]
        yield Finding("warning", f"{type(model).__name__} does not run on the meta device ({said}), so whether all its "
                      "attention goes by plans is not known.", "The first step of training tells.")  # fmt: skip


def of_layers(model: nn.Module, config: Any, cp_size: int) -> Iterator[Finding]:
    """What of the layers other than attention does not work with packed documents, or if ranks hold parts of them."""
    name, layer = next(mixing_layers(model), ("", None))
    where = "documents that are packed leak into each other" if cp_size == 1 else "ranks hold others"
    remedy = _remedy(layer, cp_size)
    if layer is None and not has_known(model):  # no class has a name that is known; the config may tell
        kinds = set(getattr(config, "layer_types", None) or ())
        for kind in sorted(k for k in kinds if any(word in k for word in MIXING_TYPES)):
            yield Finding("error", f"Layers of type {kind!r} mix neighbouring tokens, and {where}.", remedy)
    if layer is not None:
        said = f"{type(layer).__name__} mixes neighbouring tokens, and {where} (first at {name})."
        yield Finding("error", said, remedy)
        return
    if cp_size > 1 and getattr(config, "router_aux_loss_coef", 0) and getattr(config, "output_router_logits", False):
        yield Finding("warning", "The auxiliary loss of experts is taken over the tokens of each rank.",
                      "Its mean over ranks is not that of the whole sequence.")  # fmt: skip


def _remedy(layer: nn.Module | None, cp_size: int) -> str:
    """For a layer that mixes tokens without a plan."""
    if layer is not None and can_know_plans(layer):
        return "Call use_recurrent_layers(model) of magi_attention.integrations.transformers."
    for framework in _FRAMEWORKS:
        if type(layer).__module__.startswith(f"{framework}."):
            return f"Build the model from what use_magi of magi_attention.integrations.{framework} returns."
    if cp_size == 1:
        return "Train one document at a time, without packing."
    return "Take a model without such layers, or gather the sequence around them (plan.gather, plan.shard)."


def _of_attention(config: Any) -> Iterator[Finding]:
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout:
        yield Finding("error", f"attention_dropout is {dropout}, and no integration passes it on.", "Set it to 0.")
    if getattr(config, "is_causal", True) is False:
        yield Finding("error", "The model is not causal; PackingCollator plans causal masks.",
                      "Make plans with Mask.varlen(cu_seqlens).")  # fmt: skip
    implementation = getattr(config, "_attn_implementation", None)
    if implementation is not None and implementation != "magi":
        yield Finding("error", f"Attention is {implementation!r}, which sees the tokens of its own rank only.",
                      "Call register() and load the model with attn_implementation='magi'.")  # fmt: skip


def _of_kernels(model: nn.Module, config: Any, dtype: torch.dtype | None) -> Iterator[Finding]:
    """Which backend runs attention of these shapes on the machine here, and why not our kernels."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads:
        return
    heads_kv = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
    if heads % heads_kv:
        yield Finding("error", f"{heads} query heads are no multiple of {heads_kv} kv heads.", "Change the config.")
        return
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    problem = Problem("cuda", dtype, heads, heads_kv, dim, dim, AttnOptions(dim**-0.5), needs_backward=True,
                      capability=capability)  # fmt: skip
    ours = next(b for b in default_registry().backends if b.name == "ffa")
    reason = ours.why_not(problem)
    if reason is not None:
        runs = default_registry().select(problem)[0].name
        yield Finding("warning", f"{reason} Backend {runs!r} runs instead.", "docs/gpus.md says what runs where.")


__all__ = ["Finding", "of_layers", "validate"]
