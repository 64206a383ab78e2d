# SPDX-License-Identifier: Apache-2.0
"""Sums gradients over a context parallel group, where data parallel wrappers would average them.

Every rank computes the loss of its own tokens, so what is wanted of a parameter is the sum over ranks of its
gradients. ``docs/gradients.md`` says what the loss has to be divided by, and what ``Plan.shard`` does to gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError, UnsupportedError

BUCKET_BYTES = 2**26
_SPARSE = "sum_gradients takes dense gradients; make the embedding with sparse=False."
_SUMMED: WeakSet[DistributedDataParallel] = WeakSet()  # whose gradients are multiplied before DDP averages them


def sum_gradients(module: torch.nn.Module, group: dist.ProcessGroup | None = None, dp_size: int = 1) -> None:
    """After ``backward``: adds up the gradients of all parameters of ``module`` over ``group``, in place.

    Once for a step of the optimizer, after its last backward: a sum of gradients that were summed counts them once for
    each rank. For modules without a wrapper; DDP and FSDP2 want ``set_gradient_sum``. ``group`` is the context parallel
    group, or all ranks of ``dp_size`` groups, over which the sums are then averaged; None is the default group, or this
    process alone if there is none. A parameter without a gradient on some ranks gets the sum of the others. Collective;
    gradients of 64 MiB at a time are sent as one tensor, in their own dtype. ``ContractError`` for a ``dp_size`` that
    does not divide the group, ``UnsupportedError`` for sharded parameters (``DTensor``) and sparse gradients.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return
    _check_dp_size(dp_size, dist.get_world_size(group))
    parameters = [p for p in module.parameters() if p.requires_grad]
    # By the modules, too: a rank without tokens has no gradient there, and would wait for those that refuse.
    embeddings = [x for x in module.modules() if isinstance(x, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    if any(x.sparse and x.weight.requires_grad for x in embeddings):
        raise UnsupportedError(_SPARSE)
    for parameter in parameters:
        _check_plain(parameter)
    if not parameters:
        return
    _fill_missing(parameters, group)
    for gradients in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        if dp_size > 1:
            flat.div_(dp_size)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))


def set_gradient_sum(model: torch.nn.Module, dp_size: int = 1) -> None:
    """Once, before training: DDP or FSDP2 sums gradients over the context parallel ranks instead of averaging.

    ``model`` is a ``DistributedDataParallel`` or holds modules of ``fully_shard``. Its ranks are those of one context
    parallel group, or of ``dp_size`` of them, over which the sums are averaged. Gradients may be accumulated over
    several backward passes, in ``no_sync`` or not. Of a DDP each parameter gets a hook that multiplies what a backward
    pass brings, and the average of the products is the sum; so a communication hook of your own may be there.
    ``ContractError`` for other models, a ``dp_size`` that does not divide the ranks, and a DDP that has it already.
    """
    if isinstance(model, DistributedDataParallel):
        _check_dp_size(dp_size, model.process_group.size())
        _multiply_gradients(model, model.process_group.size() / dp_size)
        return
    from torch.distributed.fsdp import FSDPModule  # takes a second, which the package's import should not

    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ContractError(
            f"{type(model).__name__} is neither a DistributedDataParallel nor does it hold modules of fully_shard; "
            "wrap it first, or call sum_gradients(model, group) before each step of the optimizer."
        )
    for parameter in model.parameters():
        _check_sharded(parameter, dp_size)
    for module in sharded:
        module.set_gradient_divide_factor(float(dp_size))
        # why: without it the factor is part of the reduction, which gloo cannot do
        module.set_force_sum_reduction_for_comms(True)


def _multiply_gradients(model: DistributedDataParallel, factor: float) -> None:
    """What a backward pass brings is multiplied before it is added to ``grad``. A communication hook that sums would
    not do: DDP sends all of ``grad``, and what the backward passes before have left there is a sum already, which all
    ranks hold; an average leaves that as it is."""
    if model in _SUMMED:
        raise ContractError("This DistributedDataParallel adds up its gradients already; call set_gradient_sum once.")
    _SUMMED.add(model)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore and factor != 1:
            parameter.register_hook(partial(torch.mul, other=factor))


def _check_dp_size(dp_size: int, ranks: int) -> None:
    if ranks % as_int(dp_size, "dp_size", at_least=1):
        raise ContractError(
            f"dp_size is {dp_size}, but gradients are summed over {ranks} ranks; give the number of context parallel "
            "groups among them."
        )


def _check_plain(parameter: torch.nn.Parameter) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        raise UnsupportedError(
            "sum_gradients takes plain parameters, and these are DTensors; for FSDP2 call set_gradient_sum(model) once."
        )
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UnsupportedError(_SPARSE)


def _check_sharded(parameter: Any, dp_size: int) -> None:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    _check_dp_size(dp_size, mesh.size())
    shards = [mesh.size(i) for i, place in enumerate(parameter.placements) if isinstance(place, Shard)]
    if dp_size > 1 and shards and max(shards) == 1:
        # why: torch 2.13 divides twice where parameters are replicated only
        raise ContractError(
            f"The mesh {mesh} shards over one rank, where FSDP2 cannot average over dp_size {dp_size}; leave dp_size "
            "out and divide the loss by it."
        )


def _fill_missing(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Zeros for what has a gradient on other ranks only: all ranks must send the same tensors."""
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32).to(parameters[0].device)
    dist.all_reduce(present, group=group)
    missing = [i for i, p in enumerate(parameters) if p.grad is None]
    if missing:
        counts = present.tolist()
        for i in missing:
            if counts[i]:
                parameters[i].grad = torch.zeros_like(parameters[i])


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype and device in lists of at most ``BUCKET_BYTES``, or of one."""
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for same in kinds.values():
        bucket: list[torch.Tensor] = []
        for gradient in same:
            if bucket and sum(g.nbytes for g in [*bucket, gradient]) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
