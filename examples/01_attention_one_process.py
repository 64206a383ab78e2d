# SPDX-License-Identifier: Apache-2.0
"""Attention over two packed documents in one process, checked against plain PyTorch.

python examples/01_attention_one_process.py
"""

import torch

from magi_attention.api import Mask, attend, make_plan

# Two documents of 300 and 212 tokens in one sequence; a token sees its own document up to itself.
mask = Mask.varlen([0, 300, 512], causal=True)
plan = make_plan(mask, cp_size=1, num_heads_q=4, num_heads_kv=2, head_dim=32)

torch.manual_seed(0)
q_THD = torch.randn(512, 4, 32, dtype=torch.float64, requires_grad=True)
k_THD = torch.randn(512, 2, 32, dtype=torch.float64, requires_grad=True)
v_THD = torch.randn(512, 2, 32, dtype=torch.float64, requires_grad=True)

# What the plan works on is padded and may be in another order: shard on the way in, gather on the way out.
out_local, meta = attend(plan.shard(q_THD), plan.shard(k_THD), plan.shard(v_THD), plan)
out_THD = plan.gather(out_local)
out_THD.sum().backward()

# The same with a dense mask: heads first, every K/V head serving two query heads.
q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in (q_THD, k_THD, v_THD))
allowed = torch.from_numpy(mask.to_dense())
reference = torch.nn.functional.scaled_dot_product_attention(
    q[None], k[None], v[None], attn_mask=allowed, enable_gqa=True
)[0]
reference.sum().backward()

error = (out_THD - reference.transpose(0, 1)).abs().max().item()
grad_error = (q_THD.grad - q.grad.transpose(0, 1)).abs().max().item()
print(f"mask: {len(mask.slices)} slices, {mask.area:,} allowed pairs of {512 * 512:,}")
print(f"largest error of out {error:.1e}, of dq {grad_error:.1e}")
if max(error, grad_error) > 1e-10:
    raise SystemExit("The results differ.")
