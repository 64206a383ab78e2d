# SPDX-License-Identifier: Apache-2.0
"""Index and block-sparse attention and the indexer's lists and loss in all their kernels, few calls of each, to be run
under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitized_index.py

and with ``--tool synccheck python tests/gpu/sanitized_index.py one-place``, which leaves out what synccheck does not
take: where half a tile of the key-stationary backward has nothing to do, its warpgroups come to a named barrier at two
places of the code. PTX allows that. Results are only held to be finite; the tests of pytest compare them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import product

import torch
from block_problems import BF16, DEVICE, FP16, draw_blocks, draw_rows

from magi_attention.api import (
    block_sparse_attn_func,
    index_attn_func,
    indexer_kl,
    indexer_topk,
    indexer_topk_blocks,
    prepare_indices,
)
from magi_attention.kernels.index_attn.backward_choice import TILE_KEYS
from magi_attention.testing.indexer_kl import random_kl

# tokens, keys, query heads, kv heads, head dims, entries; values of their own or columns of the keys
LISTS = (
    (20, 300, 128, 1, 128, 128, 150),
    (20, 300, 64, 1, 128, 120, 150),
    (17, 200, 8, 2, 72, 64, 70),
    (9, 500, 96, 1, 64, 64, 300),
)
LATENTS = ((9, 300, 128, 1, 576, 512, 200), (7, 200, 16, 2, 320, 256, 70), (5, 90, 100, 1, 136, 136, 65))
# and sizes of blocks, and the share that is kept
BLOCKS = (
    (600, 700, 8, 2, 128, 128, 128, 128, 0.4),
    (600, 500, 8, 4, 64, 64, 64, 64, 0.4),
    (300, 333, 8, 1, 128, 96, 16, 16, 0.4),
    (512, 512, 16, 2, 64, 48, 256, 32, 0.4),
)

# queries, keys, index heads, index columns, query heads, kv heads, columns, entries
LOSSES = ((9, 300, 64, 128, 128, 1, 576, 200), (7, 200, 24, 56, 64, 1, 192, 70), (6, 150, 8, 128, 32, 4, 128, 90))

# queries, keys, index heads, index columns, entries, keys of a block or 0, and whether heads have weights
CHOICES = (
    (70, 300, 64, 128, 40, 0, True),
    (33, 9000, 5, 64, 16, 0, True),
    (70, 600, 40, 72, 3, 64, True),
    (9, 300, 12, 128, 4, 7, True),
    (70, 9000, 4, 128, 16, 64, False),
    (9, 500, 64, 64, 5, 16, False),
)

Call = tuple[str, Callable[..., torch.Tensor], list[torch.Tensor]]


def calls(is_one_place: bool) -> Iterator[Call]:
    """Name, function of the leaves that gives out, and the leaves with dout behind them."""
    gen = torch.Generator(DEVICE).manual_seed(0)
    for case, dtype, deterministic in product((*LISTS, *LATENTS), (BF16, FP16), (False, True)):
        indices = torch.randint(-9, case[1], (case[0], case[3], case[6]), generator=gen, device=DEVICE)
        indices[0] = -1
        lists, is_latent = prepare_indices(indices, case[1], deterministic=deterministic), case in LATENTS
        q, k, v, dout = draw_rows(case, dtype, gen)

        def attend(q, k, v=None, lists=lists, width=case[5], deterministic=deterministic):
            more = {} if v is not None else {"head_dim_v": width}
            return index_attn_func(q, k, v, lists, deterministic=deterministic, **more)[0]

        yield f"lists {case} {dtype}", attend, [q, k, dout] if is_latent else [q, k, v, dout]
    for case, forward, backward in product(BLOCKS, ("gather", "blocks"), ("queries", "keys")):
        if is_one_place and backward == "keys" and case[7] < TILE_KEYS:
            continue
        os.environ.update(MAGI_ATTENTION_INDEX_FORWARD=forward, MAGI_ATTENTION_INDEX_BACKWARD=backward)
        blocks, sizes = draw_blocks(case, gen), case[6:8]
        yield (
            f"blocks {case} {forward} {backward}",
            lambda q, k, v, blocks=blocks, sizes=sizes: block_sparse_attn_func(q, k, v, blocks, *sizes)[0],
            draw_rows(case, BF16, gen),
        )
    sizes = torch.tensor([100, 7, 193, 300], device=DEVICE)
    for case in BLOCKS[:2]:
        blocks = torch.rand((case[3], 4, 4), generator=gen, device=DEVICE) < 0.5
        yield (
            f"blocks of different sizes {case[2:6]}",
            lambda q, k, v, blocks=blocks: block_sparse_attn_func(q, k, v, blocks, sizes, sizes)[0],
            draw_rows((600, 600, *case[2:]), BF16, gen),
        )
    for case, dtype in product(LOSSES, (BF16, FP16)):
        of = random_kl(gen, dtype, *case)

        def divergence(q_index, k_index, weights, of=of):
            return indexer_kl(q_index, k_index, weights, of.q, of.k, of.lse, of.lists)

        yield f"loss {case} {dtype}", divergence, [of.q_index, of.k_index, of.weights, of.grad]


def choose() -> int:
    """Calls that make lists: how many."""
    gen = torch.Generator(DEVICE).manual_seed(1)
    runs = list(product(CHOICES, (BF16, FP16)))
    for (queries, keys, heads, dim, count, size, has_weights), dtype in runs:
        q, k = (torch.randn(s, generator=gen, device=DEVICE).to(dtype) for s in ((queries, heads, dim), (keys, dim)))
        weights = torch.randn(queries, heads, generator=gen, device=DEVICE) if has_weights else None
        masks = {"causal": False, "k_end": torch.randint(0, keys + 1, (queries,), generator=gen, device=DEVICE)}
        if size:
            indexer_topk_blocks(q, k, weights, count, size, local_blocks=1, **masks)
        else:
            indexer_topk(q, k, weights, count, **masks)
        torch.cuda.synchronize()
    return len(runs)


def main() -> int:
    count = choose()
    for name, attend, (*leaves, dout) in calls(sys.argv[1:] == ["one-place"]):
        leaves = [x.requires_grad_() for x in leaves]
        out = attend(*leaves)
        out.backward(dout)
        torch.cuda.synchronize()
        if not all(bool(x.isfinite().all()) for x in (out, *(x.grad for x in leaves))):
            print(f"{name}: not finite")
            return 1
        count += 1
    print(f"{count} calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
