# SPDX-License-Identifier: Apache-2.0
"""MSA: attention to selected blocks of keys, over a context-parallel group, by its published names.

    key = make_magi_msa_key([0, 3000, 4096], group, config=MsaConfig(topk_blocks=16))
    tokens = dispatch(tokens, key)
    positions = get_position_ids(key)
    out = calc_msa(MsaV1Inputs(q, k, v, index_q, index_k), key).output

Each query scores all keys of its document up to itself by small index heads, one for each kv head. A block of keys has
the score of its best key. The query attends to the blocks with the best scores, again to the keys up to itself.
"""

from magi_attn_extensions.MSA.config import MsaConfig, MsaKernelBackend, MsaOutput, MsaV1Inputs
from magi_attn_extensions.MSA.runtime import (
    MagiMsaKey,
    calc_msa,
    dispatch,
    get_position_ids,
    make_magi_msa_key,
    undispatch,
)

__all__ = [
    "MagiMsaKey",
    "MsaConfig",
    "MsaKernelBackend",
    "MsaOutput",
    "MsaV1Inputs",
    "calc_msa",
    "dispatch",
    "get_position_ids",
    "make_magi_msa_key",
    "undispatch",
]
