# SPDX-License-Identifier: Apache-2.0
"""Plans half a million tokens of packed documents for 64 ranks, on any laptop, and prints what it costs.

    python examples/02_plan_on_cpu.py

A plan is a plain value: no process group, no GPU. It can be compared, pickled and asked about any rank.
"""

import pickle
import random
import time

from magi_attention.api import Mask, make_plan

draw = random.Random(0)
cu_seqlens = [0]
while cu_seqlens[-1] < 524_288:  # documents of 256 to 65,536 tokens, small ones more often
    cu_seqlens.append(min(cu_seqlens[-1] + int(2 ** draw.uniform(8, 16)), 524_288))
mask = Mask.varlen(cu_seqlens, causal=True)

started = time.perf_counter()
plan = make_plan(mask, cp_size=64, num_heads_q=64, num_heads_kv=8, head_dim=128)
seconds = time.perf_counter() - started

numbers = plan.explain()
gib = {name: numbers[name] / 2**30 for name in ("bytes_total", "all_gather_bytes")}
print(f"{len(cu_seqlens) - 1} documents, {mask.total_q:,} tokens, {mask.area:,} allowed pairs")
print(
    f"{plan.cp_size} ranks, {plan.num_chunks} chunks of {plan.chunk_size} tokens, planned in {seconds:.2f} s"
)
print(f"imbalance, max/mean: {numbers['imbalance']:.4f}; contiguous: {numbers['imbalance_contiguous']:.2f}")
print(f"K and V moved: {gib['bytes_total']:.2f} GiB; an all-gather moves {gib['all_gather_bytes']:.2f} GiB")

# What one rank would do, without being it.
part = plan.rank(17)
print(f"rank 17: {part.num_tokens:,} tokens in {len(part.host_ranges)} runs, {part.area:,} pairs to compute")
for number, stage in enumerate(part.stages):
    print(f"  stage {number}: receives {stage.recv_rows:,} rows, computes {stage.area:,} pairs")

# Every rank makes the plan for itself and they agree, because equal inputs give equal plans.
again = make_plan(mask, cp_size=64, num_heads_q=64, num_heads_kv=8, head_dim=128)
assert again == plan == pickle.loads(pickle.dumps(plan))
