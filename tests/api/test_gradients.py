# SPDX-License-Identifier: Apache-2.0
"""Gradients of a packed model over cp and dp x cp ranks, under plain modules, DDP and FSDP2: as of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from magi_attention.api import Mask, attend, gradients, make_plan, set_gradient_sum, sum_gradients
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing.ref_attn import ref_attn_func
from magi_attention.testing.spawn import run_processes

VOCABULARY, HEADS, D = 11, 2, 4
SEQUENCES = ([0, 5, 12, 13, 29], [0, 20, 29])  # of the replicas
WRAPPERS = ("plain", "ddp", "fsdp", "fsdp of each", "hsdp")


class Model(nn.Module):
    """Embedding, one attention, a head; every other parameter takes part after tokens were sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * D)
        self.qkv = nn.Linear(HEADS * D, 3 * HEADS * D)
        self.head = nn.Linear(HEADS * D, VOCABULARY)
        self.double()

    def forward(self, tokens, attention, shard=lambda x: x):
        x = shard(self.embedding(tokens))
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, D)).unbind(1)
        return self.head(attention(q, k, v).flatten(1))


def make_model() -> Model:
    torch.manual_seed(3)
    return Model()


def tokens_of(replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(VOCABULARY, (29,), generator=generator)


def one_process(dp: int) -> list[torch.Tensor]:
    """Gradients of the mean over sequences of each one's mean loss."""
    model = make_model()
    for replica in range(dp):
        plan = make_plan(Mask.varlen(SEQUENCES[replica], causal=True), 1)
        tokens = tokens_of(replica)
        allowed = torch.from_numpy(Mask.varlen(SEQUENCES[replica], causal=True).to_dense())
        logits = model(tokens, lambda q, k, v, allowed=allowed: ref_attn_func(q, k, v, allowed)[0])
        ends = torch.tensor(SEQUENCES[replica][1:]) - 1
        labels = tokens.roll(-1).index_fill(0, ends, -100)
        assert torch.equal(labels, plan.labels(tokens))
        (F.cross_entropy(logits, labels) / dp).backward()
    return [p.grad for p in model.parameters()]


def wrap(model: Model, kind: str, mesh, dp: int):
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh)
    elif kind.startswith("fsdp"):
        flat = mesh["dp", "cp"]._flatten("all") if dp > 1 else mesh["cp"]
        for part in model.children() if kind == "fsdp of each" else ():
            fully_shard(part, mesh=flat)
        fully_shard(model, mesh=flat)
    if kind != "plain":
        set_gradient_sum(model, dp)
    return model


def errors(rank: int, world: int, dp: int, wrapper: str, before: str, dtype=torch.float64, shares=(1.0,)) -> float:
    """Largest difference to one process; ``before`` says how the embedding meets ``shard``, and ``shares`` of how many
    backward passes, with what share of the loss each, a step consists."""
    cp = world // dp
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    replica, group = mesh.get_local_rank("dp"), mesh.get_group("cp")
    plan = make_plan(Mask.varlen(SEQUENCES[replica], causal=True), cp)
    model = wrap(make_model().to(dtype), wrapper, mesh, dp)
    tokens = tokens_of(replica)
    local = plan.shard(tokens, group)
    labels = plan.labels(local, group=group)
    num_labels = 29 - (len(SEQUENCES[replica]) - 1)

    def attention(q, k, v):
        return attend(q, k, v, plan, group)[0]

    def shard(x):
        return plan.shard(x, group, is_partial_grad=before == "partial gradient")

    for _ in range(2):  # gradients do not depend on the step before
        model.zero_grad()
        for share in shares:
            if before == "sharded tokens":
                logits = model(local, attention)
            else:
                logits = model(tokens, attention, shard)
            (F.cross_entropy(logits, labels, reduction="sum") * share / num_labels).backward()
        if wrapper == "plain":
            sum_gradients(model, dist.group.WORLD, dp)
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    if before == "whole gradient":
        found[0] = found[0] / cp  # what docs/gradients.md says of it
    return max(float((a - b).abs().max()) for a, b in zip(found, one_process(dp), strict=True))


def all_errors(rank: int, world: int, dp: int) -> dict[tuple[str, str], float]:
    wrappers = [w for w in WRAPPERS if w != "hsdp" or dp > 1]
    forms = ("sharded tokens", "partial gradient", "whole gradient")
    found = {(w, form): errors(rank, world, dp, w, form) for w in wrappers for form in forms}
    found |= {("accumulated", w): errors(rank, world, dp, w, forms[0], shares=(0.5, 0.2, 0.3)) for w in wrappers}
    # FSDP2 divides elsewhere in float32 than in float64.
    return found | {("float32", w): errors(rank, world, dp, w, forms[0], torch.float32) for w in wrappers}


def check_errors(found: dict[tuple[str, str], float], dp: int) -> None:
    assert len(found) == 5 * (5 if dp > 1 else 4)
    assert all(error < (1e-5 if kind[0] == "float32" else 1e-12) for kind, error in found.items()), found


def test_gradients_of_replicas_are_those_of_one_process() -> None:
    for found in run_processes(4, all_errors, 2):
        check_errors(found, 2)


def missing_gradients(rank: int, world: int) -> list:
    """Parameters that only some ranks used, or none; several buckets and dtypes."""
    gradients.BUCKET_BYTES = 40
    parts = nn.ParameterDict({
        "all": nn.Parameter(torch.zeros(3)),
        "first": nn.Parameter(torch.zeros(2, 2)),
        "none": nn.Parameter(torch.zeros(5)),
        "frozen": nn.Parameter(torch.zeros(5), requires_grad=False),
        "wide": nn.Parameter(torch.zeros(100, dtype=torch.float64)),
        "strided": nn.Parameter(torch.zeros(2, 3, 2)),
    })  # fmt: skip
    loss = (rank + 1.0) * (parts["all"].sum() + parts["wide"].sum() + (parts["strided"] * torch.ones(2, 2, 3).mT).sum())
    (loss + 5 * parts["first"].sum() if rank == 0 else loss).backward()
    sum_gradients(parts)
    values = [None if p.grad is None else (p.grad.unique().tolist(), tuple(p.grad.shape)) for p in parts.values()]
    assert {name: v for name, v in zip(parts, values)} == {
        "all": ([3.0], (3,)), "first": ([5.0], (2, 2)), "none": None, "frozen": None, "wide": ([3.0], (100,)),
        "strided": ([3.0], (2, 3, 2)),
    }  # fmt: skip
    with pytest.raises(ContractError, match="dp_size is 3, but gradients are summed over 2 ranks"):
        sum_gradients(parts, None, 3)
    with pytest.raises(ContractError, match="dp_size is 0"):
        set_gradient_sum(DistributedDataParallel(nn.Linear(2, 2)), 0)
    summed = DistributedDataParallel(nn.Linear(2, 2))
    set_gradient_sum(summed)
    with pytest.raises(ContractError, match="adds up its gradients already"):
        set_gradient_sum(summed)
    with pytest.raises(ContractError, match="neither a DistributedDataParallel nor"):
        set_gradient_sum(nn.Linear(2, 2))
    sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(UnsupportedError, match=r"set_gradient_sum\(model\)"):
        sum_gradients(sharded)
    with pytest.raises(ContractError, match="dp_size is 4"):
        set_gradient_sum(sharded, 4)
    replicated = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "one")))
    with pytest.raises(ContractError, match="shards over one rank.*divide the loss"):
        set_gradient_sum(replicated, 2)
    sparse = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        sum_gradients(sparse)  # as on a rank without tokens, which must not wait for those that refuse
    by_function = nn.ParameterList([sparse.weight])
    nn.functional.embedding(torch.tensor([1]), sparse.weight, sparse=True).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        sum_gradients(by_function)
    return values


def on_two_ranks(rank: int, world: int) -> tuple[dict, list]:
    return all_errors(rank, world, 1), missing_gradients(rank, world)


def test_on_two_ranks() -> None:
    """Gradients without replicas, missing ones, and wrong calls."""
    first, second = run_processes(2, on_two_ranks)
    check_errors(first[0], 1), check_errors(second[0], 1)
    assert first[1] == second[1]


def test_a_process_alone_keeps_its_gradients() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    sum_gradients(model)
    assert torch.equal(model.weight.grad, before)
