# SPDX-License-Identifier: Apache-2.0
"""Index attention by the Hopper kernels of ``csrc/ffa/sm90/index``.

Forward: one work tile for each list. Backward: dq stays with its list; what a list adds to dk and dv is added in memory
in any order, or, with ``deterministic``, left there entry by entry and added key by key in the order of the lists.
"""

from __future__ import annotations

import torch

from magi_attention.env import build as env
from magi_attention.kernels.ffa.operands import DTYPES, dense, stride_fields
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.native.families import SM90
from magi_attention.native.index import IndexLibrary
from magi_attention.native.loader import load, why_absent

MAX_GROUP = 128  # query heads of a kv head: the rows of a tile
SHARES_BYTES = 1 << 29  # that a deterministic backward leaves in memory at a time


class IndexFfa:
    """The kernels as an ``IndexBackend``, on GPUs of compute capability 9.0."""

    name = "ffa"

    def why_not(self, problem: IndexProblem) -> str | None:
        """None if the kernels can run the problem, else a sentence."""
        p = problem
        if p.device_type != "cuda" or p.capability not in SM90.capabilities:
            return f"The kernels of index attention run on GPUs of compute capability 9.0, not on {p.device_type} " + (
                f"tensors of capability {p.capability}." if p.device_type == "cuda" else "tensors."
            )
        if env.is_portable_kernels():
            return "MAGI_ATTENTION_PORTABLE_KERNELS=1 asks for portable kernels, and index attention has none."
        if p.dtype not in DTYPES:
            return f"The kernels compute bfloat16 and float16, not {p.dtype}."
        if not p.is_plain:
            return "Lists of blocks of keys, and lists with a first or last key, have no kernel."
        if p.options.softcap or not p.options.softmax_scale > 0:
            return "The kernels have no softcap, and need a softmax_scale above 0."
        if p.num_heads_q > MAX_GROUP * p.num_heads_kv:
            return f"More than {MAX_GROUP} query heads share a kv head."
        if p.head_dim % 8 or p.head_dim_v % 8:
            return f"Head dims {p.head_dim} and {p.head_dim_v} are not both multiples of 8."
        absent = why_absent(SM90.library)
        if absent is None and not self._library().has(DTYPES[p.dtype], p.head_dim, p.head_dim_v):
            return f"There is no kernel of index attention for head dims {p.head_dim} and {p.head_dim_v}."
        return absent

    @staticmethod
    def _library() -> IndexLibrary:
        return IndexLibrary(load(SM90.library))

    def forward(
        self, problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: PreparedIndices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = map(dense, (q, k, v))
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        with torch.cuda.device(q.device):
            self._library().forward(
                **_shape(problem, q, k, v, lists), **stride_fields(q=q, k=k, v=v, out=out),
                **_addresses(q=q, k=k, v=v, out=out, lse=lse, lists=lists.rows, counts=lists.counts),
                stream=_stream(q),
            )  # fmt: skip
        return out, lse

    def backward(
        self, problem: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v, out, dout = map(dense, (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
        lse = lse.contiguous()
        dq, delta = q.new_empty(q.shape), torch.empty_like(lse)
        dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
        library, stream = self._library(), _stream(q)
        call = {
            **_shape(problem, q, k, v, lists), **stride_fields(q=q, k=k, v=v, out=out, dout=dout),
            **_addresses(q=q, k=k, v=v, dout=dout, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv),
            **_addresses(lists=lists.rows, counts=lists.counts), "stream": stream,
        }  # fmt: skip
        with torch.cuda.device(q.device):
            if not problem.options.deterministic:
                library.backward(**call, out=out.data_ptr(), token_begin=0, token_end=q.shape[0])
            else:
                for begin, end in _token_ranges(lists, k.shape[2] + v.shape[2]):
                    given = out.data_ptr() if begin == 0 else None  # later calls read the delta that this one wrote
                    shares = [x.new_empty((_entries(lists, begin, end), x.shape[2])) for x in (dk, dv)]
                    at = _addresses(dk_partials=shares[0], dv_partials=shares[1])
                    library.backward(**call, **at, out=given, token_begin=begin, token_end=end)
                    _add_shares(library, shares, (dk, dv), lists.rows[begin:end], stream)
        return dq, dk.mul_(problem.options.softmax_scale), dv


def _add_shares(
    library: IndexLibrary, shares: list[torch.Tensor], sums: tuple[torch.Tensor, ...], rows: torch.Tensor, stream: int
) -> None:
    """Adds the share of every entry of ``rows`` (tokens, Hk, N) to the row of its key and head."""
    num_rows, heads = sums[0].shape[0] * rows.shape[1], torch.arange(rows.shape[1], device=rows.device)
    owners = torch.where(rows >= 0, rows.long() * rows.shape[1] + heads[:, None], num_rows).flatten()
    owners, entries = owners.sort(stable=True)
    begins = torch.searchsorted(owners, torch.arange(num_rows + 1, device=rows.device)).int()
    entries = entries.int()
    for share, total in zip(shares, sums):
        library.sum_shares(
            num_rows=num_rows, width=total.shape[2], begins=begins.data_ptr(), entries=entries.data_ptr(),
            partials=share.data_ptr(), sums=total.data_ptr(), stream=stream,
        )  # fmt: skip


def _entries(lists: PreparedIndices, begin: int, end: int) -> int:
    return (end - begin) * lists.rows.shape[1] * lists.rows.shape[2]


def _token_ranges(lists: PreparedIndices, width: int) -> list[tuple[int, int]]:
    """Ranges of tokens whose shares fit into ``SHARES_BYTES``, one token at least."""
    tokens, of_token = lists.rows.shape[0], max(4 * width * _entries(lists, 0, 1), 1)
    step = max(SHARES_BYTES // of_token, 1)
    return [(begin, min(begin + step, tokens)) for begin in range(0, tokens, step)]


def _shape(
    problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: PreparedIndices
) -> dict[str, int | float]:
    return {
        "dtype": DTYPES[q.dtype], "total_q": q.shape[0], "total_k": k.shape[0], "heads_q": q.shape[1],
        "heads_kv": k.shape[1], "head_dim": q.shape[2], "head_dim_v": v.shape[2], "max_keys": lists.rows.shape[2],
        "sm_margin": problem.options.sm_margin, "softmax_scale": problem.options.softmax_scale,
    }  # fmt: skip


def _addresses(**tensors: torch.Tensor) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items()}


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


__all__ = ["IndexFfa"]
