# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's own integration of magi_attention, unchanged, on this package; started as ``train_tiny.py``.

It casts q, k and v to bfloat16, so results are compared as such.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nemo_automodel.components.distributed.context_parallel import magi
from tiny_models import VOCABULARY, make_model
from torch.distributed.device_mesh import init_device_mesh
from train_tiny import leave

TOKENS = 2100  # no multiple of its chunks of 512
DOCUMENTS = [700, 1, 899, 448]  # of a packed batch, a multiple of 512 in all


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def hf_path(mesh) -> dict[str, float]:
    """``model.attn_implementation: magi``: one causal sequence, dispatched; each rank has the loss of its shard."""
    state = magi.setup_magi({"model.attn_implementation": "magi"}, mesh)
    assert state.enabled and state.hf_dispatch and state.cp_size == 2
    ours, theirs = make_model("llama", "magi"), make_model("llama", "sdpa")
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)  # shifted, as its collators give them
    whole = {"input_ids": ids, "labels": labels}
    batch, indices = state.make_cp_batch(None, whole, model=ours, return_local_indices=True)
    assert indices.shape == batch["input_ids"].shape
    local_labels = batch.pop("labels")
    loss = loss_of(ours(**batch, use_cache=False), local_labels)
    want = loss_of(theirs(input_ids=ids, use_cache=False), labels)
    loss.backward()
    want.backward()
    total = loss.detach()
    dist.all_reduce(total)
    worst = 0.0
    for a, b in zip(ours.parameters(), theirs.parameters()):
        dist.all_reduce(a.grad)
        worst = max(worst, error_of(a.grad, b.grad))
    return {"loss": abs(total - want).item() / want.item(), "gradients": worst}


def loss_of(outputs, labels: torch.Tensor) -> torch.Tensor:
    logits = outputs.logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / (TOKENS - 1)


def packed_path(mesh) -> dict[str, float]:
    """``model.backend.attn: magi``: packed documents over two ranks, by the function that a custom model calls."""
    magi.setup_magi({"model.backend.attn": "magi"}, mesh)
    model, total = make_model("llama", "sdpa"), sum(DOCUMENTS)
    cu = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()])
    ids = torch.arange(total)
    batch = {"input_ids": ids, "labels": ids, "cu_seqlens": cu}
    local, _ = magi.magi_prepare_packed_cp(model, batch, mesh["cp"].get_group())
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(total, heads, 8, generator=generator) for heads in (4, 2, 2))
    rows = local["input_ids"]  # which rows are here
    assert torch.equal(rows, local["position_ids"]) and torch.equal(rows, local["labels"])
    out = magi.make_magi_attn_func(0.3)(q[rows], k[rows], v[rows])
    want = torch.cat([attend(q[a:b], k[a:b], v[a:b], torch.ones(b - a, b - a).tril()) for a, b in zip(cu, cu[1:])])
    return {"out": error_of(out, want[rows])}


def prefix_tree() -> dict[str, float]:
    """A mask of its own form on one rank: a prompt and two responses."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    magi.set_active_cp_group(alone)
    spec, _ = magi.AttnMaskSpec.prefix_tree([256, 128, 128], [[0, 1], [0, 2]])
    magi.set_active_attn_spec(spec)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(512, heads, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(512, 512).tril()
    mask[384:, 256:384] = 0  # the second response does not see the first
    out = magi.make_magi_attn_func(0.3)(q, k, v)
    return {"out": error_of(out, attend(q, k, v, mask))}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask.bool(), scale=0.3, enable_gqa=True)[0].transpose(0, 1)


def main(out: str, settings: dict) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    errors = {"hf": hf_path(mesh), "packed": packed_path(mesh), "tree": prefix_tree()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"processes": dist.get_world_size(), "errors": errors}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
