# SPDX-License-Identifier: Apache-2.0
"""Index attention by the Hopper kernels of ``csrc/ffa/sm90/index``.

Forward: work tiles of queries that share a list; ``forward_choice`` says how its keys are brought. Backward: dq stays
with its list; what a list adds to dk and dv is added in memory in any order, or, with ``deterministic``, left there
entry by entry and added key by key in the order of the lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.env import build as env
from magi_attention.kernels.ffa.operands import DTYPES, dense, stride_fields
from magi_attention.kernels.index_attn.backward_choice import is_key_stationary
from magi_attention.kernels.index_attn.forward_choice import copies_blocks
from magi_attention.kernels.index_attn.invert import key_counts, with_readers
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.native.families import SM90
from magi_attention.native.index.calls import IndexLibrary
from magi_attention.native.loader import load, why_absent

SHARES_BYTES = 1 << 29  # that a deterministic backward leaves in memory at a time, where a list does not need more
MOST_SHARES_BYTES = 1 << 31
HEAD_SPLITS = 2  # parts of the query heads of a kv head, in which the key-stationary backward takes all tiles


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
        if p.options.softcap or not p.options.softmax_scale > 0:
            return "The kernels have no softcap, and need a softmax_scale above 0."
        if p.head_dim % 8 or p.head_dim_v % 8:
            return f"Head dims {p.head_dim} and {p.head_dim_v} are not both multiples of 8."
        return why_absent(SM90.library) or self._why_no_kernel(p)

    def _why_no_kernel(self, p: IndexProblem) -> str | None:
        library = self._library()
        takes_v = p.has_v or library.has(DTYPES[p.dtype], p.head_dim, p.head_dim_v)
        if not library.has(DTYPES[p.dtype], p.head_dim, p.head_dim_v, takes_v):
            form = "" if takes_v else " of values that are columns of k"
            return f"There is no kernel of index attention for head dims {p.head_dim} and {p.head_dim_v}{form}."
        tiles = library.tiles(p.num_heads_q, p.num_heads_kv, p.q_block_size, takes_v)
        if not tiles:
            return (
                f"{p.num_heads_q // p.num_heads_kv} query heads on a kv head and lists of {p.q_block_size} queries do "
                "not fit the tiles of the kernels."
            )
        width = 4 * p.num_heads_kv * tiles * (p.head_dim + p.head_dim_v * takes_v)
        if p.options.deterministic and p.needs_backward and p.topk * p.k_block_size * width > MOST_SHARES_BYTES:
            keys = f"{p.topk} blocks of {p.k_block_size} keys"
            return f"A deterministic backward of lists of {keys} would leave more than {MOST_SHARES_BYTES} bytes each."
        return None

    @staticmethod
    def _library() -> IndexLibrary:
        return IndexLibrary(load(SM90.library))

    def forward(
        self, problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operands = self._operands(problem, q=q, k=k, v=v)
        out = _empty((*q.shape[:2], problem.head_dim_v), q.dtype, q.device)
        lse = _empty(q.shape[:2], torch.float32, q.device)
        by_blocks = "v" in operands and copies_blocks(problem, lists)
        if by_blocks:
            work = _empty((1 + lists.counts.numel(),), torch.int32, q.device)
            held = {"lists": lists.rows, "counts": lists.counts, "workspace": work}
        else:
            held = _lists(lists)
        with torch.cuda.device(q.device):
            run = self._library().forward_by_blocks if by_blocks else self._library().forward
            run(
                **_shape(problem, operands, lists), **stride_fields(**operands, out=out),
                **_addresses(**operands, out=out, lse=lse, **held), stream=_stream(q),
            )  # fmt: skip
        return out, lse

    def backward(
        self, problem: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices, delta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        operands = self._operands(problem, q=q, k=k, v=v, dout=dout.to(q.dtype))
        out, lse = dense(out.to(q.dtype)), lse.contiguous()
        if delta is not None:
            delta = delta.to(torch.float32).contiguous()
        by_keys = "v" in operands and is_key_stationary(problem, lists)
        run = self._backward_by_keys if by_keys else self._backward_by_queries
        dq, grads = run(problem, operands, out, lse, lists, delta)
        if problem.has_v:
            return dq, grads["dk"], grads["dv"]
        dk = grads["dk"].float()
        if "dv" in grads:
            dk[..., : problem.head_dim_v] += grads["dv"]
        return dq, dk, None

    def _operands(self, problem: IndexProblem, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The tensors that a kernel reads. Columns of k are a ``v`` where there is a kernel that takes one; else there
        is none, and the kernel knows."""
        p, k = problem, tensors["k"]
        if k is not None and not p.has_v and self._library().has(DTYPES[p.dtype], p.head_dim, p.head_dim_v):
            tensors["v"] = k[..., : p.head_dim_v]
        return {name: dense(x) for name, x in tensors.items() if x is not None}

    def _backward_by_queries(
        self, problem: IndexProblem, operands: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor,
        lists: PreparedIndices, delta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """dq in q's dtype, the others in float32."""
        q, k = operands["q"], operands["k"]
        dq, takes_v = q.new_empty(q.shape), "v" in operands
        first_out = out.data_ptr() if delta is None else None  # without out the kernels read delta
        delta = torch.empty_like(lse) if delta is None else delta
        grads = {
            f"d{n}": operands[n].new_zeros(operands[n].shape, dtype=torch.float32) for n in ("k", "v") if n in operands
        }
        library, stream, held = self._library(), _stream(q), _lists(lists)
        tiles = library.tiles(q.shape[1], k.shape[1], lists.q_block_size, takes_v)
        call = {
            **_shape(problem, operands, lists), **stride_fields(**operands, out=out),
            **_addresses(**operands, lse=lse, delta=delta, dq=dq, **grads, **held), "stream": stream,
        }  # fmt: skip
        with torch.cuda.device(q.device):
            if not problem.options.deterministic:
                library.backward(**call, out=first_out, list_begin=0, list_end=lists.rows.shape[0])
            else:
                lists = with_readers(lists)
                sum_call = _sum_call(lists, held["key_counts"], tiles)
                for begin, end in _list_ranges(lists, tiles * sum(x.shape[2] for x in grads.values())):
                    some = {"list_begin": begin, "list_end": end}
                    given = first_out if begin == 0 else None  # later calls read the delta that this one wrote
                    num_shares = (end - begin) * tiles * lists.rows[0].numel() * lists.k_block_size
                    shares = {f"{n}_partials": x.new_empty((num_shares, x.shape[2])) for n, x in grads.items()}
                    library.backward(**call, **_addresses(**shares), out=given, **some)
                    for x, share in zip(grads.values(), shares.values()):
                        more = _addresses(sums=x, partials=share)
                        library.sum_shares(**sum_call, **some, **more, width=x.shape[2], stream=stream)
        if takes_v:  # else the kernel has scaled dk, as the gradient of the values is in it
            grads["dk"].mul_(problem.options.softmax_scale)
        return dq, grads

    def _backward_by_keys(
        self, problem: IndexProblem, operands: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor,
        lists: PreparedIndices, delta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """All gradients in q's dtype."""
        q = operands["q"]
        grads = {f"d{n}": _empty(operands[n].shape, q.dtype, q.device) for n in ("q", "k", "v")}
        held: list[torch.Tensor] = []

        def allocate(num_bytes: int) -> int:
            held.append(_empty((num_bytes,), torch.uint8, q.device))
            return held[0].data_ptr()

        with torch.cuda.device(q.device):
            self._library().backward_by_keys(
                allocate, **_shape(problem, operands, lists), **stride_fields(**operands, out=out),
                **_addresses(**operands, lse=lse, **grads, lists=lists.rows, counts=lists.counts),
                **_addresses(**({"out": out} if delta is None else {"delta": delta})),
                num_head_splits=HEAD_SPLITS, stream=_stream(q),
            )  # fmt: skip
        return grads.pop("dq"), grads


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _sum_call(lists: PreparedIndices, counts: torch.Tensor, tiles: int) -> dict[str, int]:
    """What sums of shares have in common. ``lists`` are inverted."""
    assert lists.readers is not None and lists.reader_begins is not None
    return {
        "total_k": lists.total_k, "heads_kv": lists.rows.shape[1], "k_block": lists.k_block_size,
        "max_entries": lists.rows.shape[2], "num_tiles": tiles, "has_starts": int(lists.k_start is not None),
        **_addresses(readers=lists.readers, reader_begins=lists.reader_begins, key_counts=counts),
    }  # fmt: skip


def _lists(lists: PreparedIndices) -> dict[str, torch.Tensor]:
    """What kernels read of the lists, to be held until the launch."""
    held = {"lists": lists.rows, "key_counts": key_counts(lists)}
    if lists.k_start is not None:
        held["k_starts"] = lists.k_start.int()
    return held


def _list_ranges(lists: PreparedIndices, width: int) -> list[tuple[int, int]]:
    """Ranges of lists whose shares fit into ``SHARES_BYTES``, one list at least."""
    num_lists, heads, entries = lists.rows.shape
    step = max(SHARES_BYTES // max(4 * width * heads * entries * lists.k_block_size, 1), 1)
    return [(begin, min(begin + step, num_lists)) for begin in range(0, num_lists, step)]


def _shape(p: IndexProblem, operands: dict[str, torch.Tensor], lists: PreparedIndices) -> dict[str, int | float]:
    return {
        "dtype": DTYPES[p.dtype], "total_q": len(operands["q"]), "total_k": len(operands["k"]),
        "heads_q": p.num_heads_q, "heads_kv": p.num_heads_kv, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
        "max_entries": lists.rows.shape[2], "q_block": lists.q_block_size, "k_block": lists.k_block_size,
        "sm_margin": p.options.sm_margin, "softmax_scale": p.options.softmax_scale,
    }  # fmt: skip


def _addresses(**tensors: torch.Tensor) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items()}


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


__all__ = ["IndexFfa"]
