# SPDX-License-Identifier: Apache-2.0
"""``utils.sparse_utils``: block-sparse and index-sparse patterns: generators, kernel ranges, dense references.

Shapes: H heads (query or KV), Nq and Nk numbers of query and key blocks, B batch. *Flattened* means that
heads are laid one after another along the sequence, ``(h s)``, so that a pattern per head becomes ranges of
one long sequence. ``device`` None is CUDA if there is one, else the CPU. Draws use torch's global generator.
"""

from __future__ import annotations

import torch

from magi_attention.compat.utils.device import default_device
from magi_attention.errors import ContractError

Device = torch.device | str | None
Ranges = tuple[torch.Tensor, torch.Tensor]


def _device(device: Device) -> torch.device:
    return default_device() if device is None else torch.device(device)


def _num_pattern_heads(mode: str, num_q_heads: int, num_kv_heads: int) -> int:
    if num_q_heads % num_kv_heads:
        raise ContractError(f"{num_q_heads} q heads are no multiple of {num_kv_heads} kv heads; change one.")
    heads = {"per_kv_head": num_kv_heads, "per_q_head": num_q_heads, "shared": 1}
    if mode not in heads:
        raise ContractError(f"mode={mode!r} is unknown; use one of {', '.join(map(repr, heads))}.")
    return heads[mode]


# ---- generators ---------------------------------------------------------------------------------------


def generate_block_sparse_pattern(
    num_q_heads: int,
    num_kv_heads: int,
    num_q_blocks: int,
    num_kv_blocks: int,
    sparsity: float,
    mode: str = "per_kv_head",
    sparse_format: str = "block_mask",
    device: Device = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks with the highest scores of every row of blocks.

    Args:
        sparsity: share of key blocks that is *kept* per row of blocks, at least one.
        mode: one pattern per KV head, per query head, or for all (``shared``); H is their number.
        sparse_format: ``block_mask`` gives bool ``(1, H, Nq, Nk)``, ``topk`` the ascending indices of the
            kept blocks, int32 ``(H, Nq, kept)``.
        scores: ``(H, Nq, Nk)``; random if None.
    Returns:
        (pattern, scores).
    """
    heads = _num_pattern_heads(mode, num_q_heads, num_kv_heads)
    shape = (heads, num_q_blocks, num_kv_blocks)
    if scores is None:
        scores = torch.rand(shape, device=_device(device))
    if tuple(scores.shape) != shape:
        raise ContractError(f"scores have shape {tuple(scores.shape)}; give {shape}.")
    kept = min(max(1, int(sparsity * num_kv_blocks)), num_kv_blocks)
    indices = scores.topk(kept, dim=-1).indices.sort(dim=-1).values
    if sparse_format == "topk":
        return indices.int(), scores
    if sparse_format != "block_mask":
        raise ContractError(f"sparse_format={sparse_format!r} is unknown; use 'block_mask' or 'topk'.")
    mask = torch.zeros(shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, indices, True)[None], scores


def generate_variable_block_sparse_pattern(
    num_q_heads: int,
    num_kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    num_q_blocks: int,
    num_kv_blocks: int,
    sparsity: float,
    mode: str = "per_kv_head",
    min_q_block_size: int = 64,
    min_kv_block_size: int = 64,
    device: Device = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of random sizes: (mask ``(1, H, Nq, Nk)``, row sizes ``(H, Nq)``, column sizes ``(num_kv_heads, Nk)``).

    Sizes are int32 tokens, at least the given minimum, and sum to the sequence length in every head. ``mode`` is
    ``per_kv_head`` or ``per_q_head``.
    """
    if mode == "shared":
        raise ContractError("mode='shared' has no sizes per head; use 'per_kv_head' or 'per_q_head'.")
    heads = _num_pattern_heads(mode, num_q_heads, num_kv_heads)
    mask, _ = generate_block_sparse_pattern(
        num_q_heads, num_kv_heads, num_q_blocks, num_kv_blocks, sparsity, mode, device=device
    )
    rows = _random_sizes(heads, seqlen_q, num_q_blocks, min_q_block_size, mask.device)
    return mask, rows, _random_sizes(num_kv_heads, seqlen_k, num_kv_blocks, min_kv_block_size, mask.device)


def _random_sizes(heads: int, total: int, parts: int, minimum: int, device: torch.device) -> torch.Tensor:
    spare = total - parts * minimum
    if spare < 0:
        raise ContractError(f"{parts} blocks of at least {minimum} do not fit in {total} tokens; use fewer.")
    cuts = torch.randint(0, spare + 1, (heads, parts - 1), device=device).sort(dim=-1).values
    edges = torch.nn.functional.pad(cuts, (1, 0), value=0)
    edges = torch.nn.functional.pad(edges, (0, 1), value=spare)
    return (edges.diff(dim=-1) + minimum).int()


def build_index_attn_indices(
    B: int,
    NHK: int,
    S_q: int,
    S_kv: int,
    topk: int,
    max_topk: int,
    device: Device = None,
    k_block_size: int = 1,
) -> torch.Tensor:
    """Random distinct key rows per query: int32 ``(B * S_q, NHK, max_topk)``, padded with -1.

    An entry is ``(b * n + t) * NHK + h`` with t below ``n = S_kv // k_block_size``: a row of the
    flattened KV tensor, or a block of rows when ``k_block_size > 1``.
    """
    blocks = S_kv // k_block_size
    if topk > min(blocks, max_topk):
        raise ContractError(f"topk {topk} exceeds {min(blocks, max_topk)}, the most there can be; lower it.")
    device = _device(device)
    t = torch.rand((B, S_q, NHK, blocks), device=device).topk(topk, dim=-1).indices
    b = torch.arange(B, device=device).view(B, 1, 1, 1)
    h = torch.arange(NHK, device=device).view(1, 1, NHK, 1)
    flat = ((b * blocks + t) * NHK + h).reshape(B * S_q, NHK, topk)
    return torch.nn.functional.pad(flat, (0, max_topk - topk), value=-1).int()


# ---- flattening and kernel ranges ---------------------------------------------------------------------


def flatten_block_mask(mask_4d: torch.Tensor, num_q_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Bool ``(num_q_heads * Nq, num_kv_heads * Nk)``: query head h sees the blocks of its KV head only.

    ``mask_4d`` is ``(1, H, Nq, Nk)`` with one pattern per query head or per KV head.
    """
    batch, heads, nq, nk = mask_4d.shape
    if batch != 1 or num_q_heads % num_kv_heads or num_q_heads % heads:
        raise ContractError(
            f"A mask {tuple(mask_4d.shape)} for {num_q_heads} query and {num_kv_heads} KV heads; give "
            "(1, H, Nq, Nk) with H and the KV heads dividing the query heads."
        )
    per_q_head = mask_4d[0].repeat_interleave(num_q_heads // heads, dim=0)
    out = torch.zeros((num_q_heads, nq, num_kv_heads, nk), dtype=torch.bool, device=mask_4d.device)
    q_head = torch.arange(num_q_heads, device=mask_4d.device)
    out[q_head, :, q_head // (num_q_heads // num_kv_heads)] = per_q_head.bool()
    return out.reshape(num_q_heads * nq, num_kv_heads * nk)


def flatten_block_mask_to_kv_shape(mask_kv_4d: torch.Tensor) -> torch.Tensor:
    """Bool ``(H * Nq, H * Nk)``, block-diagonal over the heads of ``mask_kv_4d (1, H, Nq, Nk)``."""
    return flatten_block_mask(mask_kv_4d, mask_kv_4d.shape[1], mask_kv_4d.shape[1])


def generate_ranges_from_block_mask(block_mask: torch.Tensor, block_m: int, block_n: int) -> Ranges:
    """``(q_ranges, k_ranges)``, int32 ``(n, 2)``, one pair per set block of ``block_mask (Nq, Nk)``, row by row."""
    rows, columns = block_mask.nonzero(as_tuple=True)
    return _block_ranges(rows, block_m), _block_ranges(columns, block_n)


def generate_ranges_from_block_mask_triton(block_mask: torch.Tensor, block_m: int, block_n: int) -> Ranges:
    """``(q_ranges, k_ranges)``, int32, one pair for every block of ``block_mask (B, H, Nq, Nk)``, empty ones ``(0, 0)``
    where it is not set, so that nothing waits for the device. Blocks of head h begin at ``h * Nq`` and ``h * Nk``."""
    _, heads, nq, nk = block_mask.shape
    head = torch.arange(heads, device=block_mask.device).view(1, heads, 1, 1)
    row = torch.arange(nq, device=block_mask.device).view(1, 1, nq, 1)
    column = torch.arange(nk, device=block_mask.device).view(1, 1, 1, nk)
    is_set = block_mask.reshape(-1, 1).bool()
    q_blocks = (head * nq + row).expand_as(block_mask).reshape(-1)
    k_blocks = (head * nk + column).expand_as(block_mask).reshape(-1)
    return _block_ranges(q_blocks, block_m) * is_set, _block_ranges(k_blocks, block_n) * is_set


def generate_ranges_from_topk_indices(
    topk_indices: torch.Tensor, block_m: int, block_n: int, num_k_blocks: int
) -> Ranges:
    """The same from kept block ids ``(H, Nq, kept)`` (or with a 1 before); ids below 0 are padding."""
    ids = topk_indices.reshape(topk_indices.shape[-3:])
    head, row, slot = (ids >= 0).nonzero(as_tuple=True)
    q_block = head * ids.shape[1] + row
    return (
        _block_ranges(q_block, block_m),
        _block_ranges(head * num_k_blocks + ids[head, row, slot], block_n),
    )


# The torch form does on any device what the published package has a triton kernel for.
generate_ranges_from_topk_indices_triton = generate_ranges_from_topk_indices


def _block_ranges(blocks: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([blocks * size, (blocks + 1) * size], dim=1).int()


def generate_ranges_from_var_block_mask(
    block_mask: torch.Tensor,
    block_row_sz: torch.Tensor,
    block_col_sz: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> Ranges:
    """``(q_ranges, k_ranges)`` of a flattened mask ``(num_q_heads * Nq, num_kv_heads * Nk)``.

    Sizes are ``(H, N)`` tokens, H dividing the number of heads of that side.
    """
    q_edges = _flat_edges(block_row_sz, num_q_heads)
    k_edges = _flat_edges(block_col_sz, num_kv_heads)
    rows, columns = block_mask.nonzero(as_tuple=True)
    return (
        torch.stack([q_edges[rows], q_edges[rows + 1]], dim=1).int(),
        torch.stack([k_edges[columns], k_edges[columns + 1]], dim=1).int(),
    )


def _flat_edges(sizes: torch.Tensor, heads: int) -> torch.Tensor:
    if sizes.shape[0] <= heads:
        sizes = sizes.repeat_interleave(heads // sizes.shape[0], dim=0)
    else:  # one pattern per query head, of which each KV head has the columns of its first
        sizes = sizes[:: sizes.shape[0] // heads]
    return torch.nn.functional.pad(sizes.reshape(-1).long().cumsum(0), (1, 0))


# ---- dense references ---------------------------------------------------------------------------------


def get_sdpa_mask_from_block_sparse_mask(
    block_mask: torch.Tensor,
    seqlen_q: int,
    seqlen_k: int,
    block_size_q: int,
    block_size_k: int,
    num_q_heads: int,
    batch_size: int = 1,
) -> torch.Tensor:
    """Bool ``(batch_size, num_q_heads, seqlen_q, seqlen_k)`` from blocks ``(1, H, Nq, Nk)``."""
    dense = block_mask.bool().repeat_interleave(block_size_q, dim=2).repeat_interleave(block_size_k, dim=3)
    dense = dense[:, :, :seqlen_q, :seqlen_k].repeat_interleave(num_q_heads // block_mask.shape[1], dim=1)
    return dense.expand(batch_size, -1, -1, -1)


deprecated_slow_get_sdpa_mask_from_block_sparse_mask = get_sdpa_mask_from_block_sparse_mask


def get_sdpa_mask_from_topk_indices(
    topk_indices: torch.Tensor,
    seqlen_q: int,
    seqlen_k: int,
    block_size_q: int,
    block_size_k: int,
    num_q_heads: int,
    batch_size: int = 1,
) -> torch.Tensor:
    """Bool ``(batch_size, num_q_heads, seqlen_q, seqlen_k)`` from kept block ids ``(H, Nq, kept)``."""
    blocks = -(-seqlen_k // block_size_k)
    topk_indices = topk_indices.reshape(1, *topk_indices.shape[-3:])
    shape = (*topk_indices.shape[:-1], blocks + 1)
    ids = torch.where(topk_indices < 0, blocks, topk_indices).long()  # padding goes to a spare column
    mask = torch.zeros(shape, dtype=torch.bool, device=ids.device).scatter_(-1, ids, True)[..., :blocks]
    return get_sdpa_mask_from_block_sparse_mask(
        mask, seqlen_q, seqlen_k, block_size_q, block_size_k, num_q_heads, batch_size
    )


def get_sdpa_mask_from_var_block_mask(
    block_mask: torch.Tensor,
    seqlen_q: int,
    seqlen_k: int,
    block_row_sz: torch.Tensor,
    block_col_sz: torch.Tensor,
    num_q_heads: int,
    bsz: int = 1,
) -> torch.Tensor:
    """Bool ``(bsz, num_q_heads, seqlen_q, seqlen_k)`` from ``block_mask (1, H, Nq, Nk)``.

    Row sizes are ``(H, Nq)``, column sizes ``(H or KV heads, Nk)``; rows and columns beyond their sum are False.
    """
    heads, per_columns = block_mask.shape[1], block_mask.shape[1] // block_col_sz.shape[0]
    dense = torch.zeros((heads, seqlen_q, seqlen_k), dtype=torch.bool, device=block_mask.device)
    for h in range(heads):
        rows = block_mask[0, h].bool().repeat_interleave(block_row_sz[h], dim=0)
        part = rows.repeat_interleave(block_col_sz[h // per_columns], dim=1)[:seqlen_q, :seqlen_k]
        dense[h, : part.shape[0], : part.shape[1]] = part
    return dense.repeat_interleave(num_q_heads // heads, dim=0)[None].expand(bsz, -1, -1, -1)


def get_sdpa_mask_from_index_attn_indices(
    index_attn_indices: torch.Tensor,
    B: int,
    NHQ: int,
    NHK: int,
    S_q: int,
    S_kv: int,
    device: Device = None,
    k_block_size: int = 1,
) -> torch.Tensor:
    """Bool ``(B, NHQ, S_q, S_kv)`` from the indices of ``build_index_attn_indices``."""
    blocks = S_kv // k_block_size
    ids = index_attn_indices.to(_device(device)).view(B, S_q, NHK, -1).long()
    t = torch.where(ids < 0, blocks, ids // NHK % blocks)
    mask = torch.zeros((B, S_q, NHK, blocks + 1), dtype=torch.bool, device=ids.device)
    mask = mask.scatter_(-1, t, True)[..., :blocks].repeat_interleave(k_block_size, dim=-1)
    mask = torch.nn.functional.pad(mask, (0, S_kv - mask.shape[-1]))
    return mask.permute(0, 2, 1, 3).repeat_interleave(NHQ // NHK, dim=1)


# ---- tiles --------------------------------------------------------------------------------------------


def choose_ref_block(block_size: tuple[int, int], qhead_per_khead: int) -> dict:
    """Tile and flags for blocks of ``(q, k)`` tokens and so many query heads per KV head.

    Key blocks below 64 are gathered (``sparse_load``) into 128 keys; else N is the block rounded up to 16,
    at most 256. Query blocks below 128 count ``q * qhead_per_khead`` rows when packed: up to 16 rows the
    operands are swapped, with a tile of (8 or 16, 64), also under ``sparse_load``; else M is a multiple of
    64, at most 128.
    """
    q_block, k_block = block_size
    if q_block < 1 or k_block < 1 or qhead_per_khead < 1:
        raise ContractError(f"Block {block_size} with {qhead_per_khead} heads per KV head; all must be >= 1.")
    sparse_load = k_block < 64
    n = 128 if sparse_load else min(256, -(-k_block // 16) * 16)
    pack_gqa = q_block < 128 and qhead_per_khead > 1
    rows = min(q_block * qhead_per_khead, 128) if q_block < 128 else 128
    swap_ab = rows <= 16
    if swap_ab:
        m, n = (8 if rows <= 8 else 16), 64
    else:
        m = -(-rows // 64) * 64
    return {
        "ref_block_size": (m, n),
        "swap_ab": swap_ab,
        "pack_gqa": pack_gqa,
        "sparse_load": sparse_load,
        "index_attn": False,
    }
