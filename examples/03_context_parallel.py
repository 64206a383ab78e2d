# SPDX-License-Identifier: Apache-2.0
"""One attention over four processes (gloo, no GPU), checked against the dense computation in each.

    python examples/03_context_parallel.py [ranks]

Started by torchrun instead, it uses the processes that torchrun made.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from magi_attention.api import Mask, attend, make_plan


def worker() -> None:
    """One rank. Every rank could make its own inputs; here all make the same ones to be able to check."""
    total, heads_q, heads_kv, head_dim = 1000, 4, 2, 16
    mask = Mask.varlen([0, 137, 600, 1000], causal=True)
    plan = make_plan(
        mask, dist.get_world_size(), num_heads_q=heads_q, num_heads_kv=heads_kv, head_dim=head_dim
    )

    torch.manual_seed(0)
    shapes = ((total, heads_q, head_dim), (total, heads_kv, head_dim), (total, heads_kv, head_dim))
    full = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    # From here on a rank holds only its own tokens; shard also makes the gradients find their way back.
    q_local, k_local, v_local = (plan.shard(x) for x in full)
    out_local, _ = attend(q_local, k_local, v_local, plan)
    out = plan.gather(out_local)
    (out**2).sum().backward()

    q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in full)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=torch.from_numpy(mask.to_dense()), enable_gqa=True
    )[0]
    (reference**2).sum().backward()

    errors = {"out": (out - reference.transpose(0, 1)).abs().max().item()}
    for name, mine, theirs in zip(("dq", "dk", "dv"), full, (q, k, v)):
        errors[name] = (mine.grad - theirs.grad.transpose(0, 1)).abs().max().item()
    rank, text = dist.get_rank(), ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"rank {rank}: {len(q_local)} tokens, largest errors: {text}", flush=True)
    if max(errors.values()) > 1e-8:
        raise SystemExit(f"rank {rank}: the results differ.")


def spawned(rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    worker()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        worker()
        dist.destroy_process_group()
    else:
        ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.spawn(spawned, args=(ranks, free_port), nprocs=ranks)
