# SPDX-License-Identifier: Apache-2.0
"""indexer_topk_blocks chooses the blocks of MiniMax-M3's indexer in transformers, of each packed document alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl", reason="needs transformers; ci/integrations installs it")

from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax  # noqa: E402
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig  # noqa: E402

from magi_attention.api import indexer_topk_blocks  # noqa: E402

CU_SEQLENS = [0, 9, 61, 140]


@pytest.mark.parametrize("local_blocks", [0, 2])
def test_documents_choose_as_if_alone(local_blocks):
    config = MiniMaxM3VLTextConfig(
        hidden_size=40, index_n_heads=2, index_head_dim=16, index_block_size=8, index_topk_blocks=4,
        index_local_blocks=local_blocks,
    )  # fmt: skip
    torch.manual_seed(1)
    print("seed 1")
    theirs = minimax.MiniMaxM3VLIndexer(config, 0)
    projected = {}
    for name in ("q_norm", "k_norm"):
        getattr(theirs, name).register_forward_hook(lambda _, __, out, name=name: projected.update({name: out[0]}))
    q_index, k_index, chosen = [], [], []
    for start, stop in zip(CU_SEQLENS, CU_SEQLENS[1:]):
        at = torch.arange(stop - start)[None]
        flat = torch.ones(1, stop - start, 16), torch.zeros(1, stop - start, 16)  # no rotation
        blocks = theirs(torch.randn(1, stop - start, 40), flat, None, at)[0].transpose(0, 1)
        blocks = blocks.masked_fill(blocks < 0, 99).sort(2).values
        chosen.append(torch.nn.functional.pad(blocks, (0, 4 - blocks.shape[2]), value=99))
        q_index.append(projected["q_norm"])
        k_index.append(projected["k_norm"][:, 0])
    lists = indexer_topk_blocks(
        torch.cat(q_index), torch.cat(k_index), None, 4, 8, local_blocks=local_blocks, cu_seqlens=CU_SEQLENS
    )
    want = torch.cat(chosen)
    assert torch.equal(lists.rows, want.masked_fill(want == 99, -1).int())
