# SPDX-License-Identifier: Apache-2.0
"""What an implementation of index attention is asked and what it gives back.

Query t sees, in the heads of kv head h, a list of keys of its own. Shapes: q (Tq, Hq, D), k (Tk, Hk, D),
v (Tk, Hk, Dv), out (Tq, Hq, Dv), lse (Tq, Hq), lists (L, Hk, N); Hq is a multiple of Hk. Where v is None the values are
the first Dv columns of k, as in MLA's latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from magi_attention.kernels.types import AttnOptions, Problem


class KeptReaders(Protocol):
    """What keeps the inverted lists of prepared ones: ``invert.Kept``."""

    def of(self, lists: PreparedIndices) -> PreparedIndices: ...


class PreparedIndices(NamedTuple):
    """Lists of keys in the order that kernels want, as ``prepare_indices`` makes them.

    ``rows`` int32 (L, Hk, N), contiguous: each list ascending, every entry once, then -1 to its end. ``counts`` int32
    (L, Hk): entries of each list. List l is that of ``q_block_size`` queries from ``l * q_block_size`` on.
    ``total_k``: rows of k that they are for. With ``k_block_size`` 1 and ``k_start`` None an entry is a row of k. Else
    entry b is the block of ``k_block_size`` rows from ``k_start[l] + b * k_block_size`` on, and only its rows before
    ``k_end[l]`` are seen (int64 (L,) each; None: 0 and ``total_k``).

    ``readers`` int32 (L * Hk * N,) and ``reader_begins`` int32 (S * Hk + 1,), or None: the lists by key, which a
    deterministic backward needs. A block begins at one of S keys: at every ``k_block_size``-th, or with ``k_start`` at
    any. ``readers[reader_begins[i] : reader_begins[i + 1]]`` are the places in ``rows``, flattened and ascending, that
    name the block from the key ``i // Hk`` of these on, in kv head ``i % Hk``. Places that name no key come last.
    ``kept`` makes both where they are None, once for all calls, and holds them.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    total_k: int
    k_block_size: int = 1
    k_start: torch.Tensor | None = None
    k_end: torch.Tensor | None = None
    q_block_size: int = 1
    readers: torch.Tensor | None = None
    reader_begins: torch.Tensor | None = None
    kept: KeptReaders | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """What ops take: all fields but ``kept``."""
        return self[:-1]

    def num_lists(self, total_q: int) -> int:
        """Lists that so many queries have."""
        return -(-total_q // self.q_block_size)

    @property
    def is_plain(self) -> bool:
        """Are entries rows of k?"""
        return self.k_block_size == 1 and self.k_start is None and self.k_end is None


@dataclass(frozen=True)
class IndexProblem(Problem):
    """A ``Problem`` whose lists have up to ``topk`` entries; block sizes as of ``PreparedIndices``.

    ``has_v`` False: the values are the first ``head_dim_v`` columns of k.
    """

    topk: int = 0
    q_block_size: int = 1
    k_block_size: int = 1
    has_v: bool = True

    @classmethod
    def of_lists(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, options: AttnOptions, lists: PreparedIndices,
        sink: torch.Tensor | None = None, needs_backward: bool = False, head_dim_v: int | None = None,
    ) -> IndexProblem:  # fmt: skip
        """The problem posed by these tensors; equal ones are one object. ``head_dim_v`` counts where v is None; by
        default all columns of k."""
        width = v.shape[2] if v is not None else k.shape[2] if head_dim_v is None else head_dim_v
        return _problem_of(
            q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], width, options, sink is not None, needs_backward,
            lists.rows.shape[2], lists.q_block_size, lists.k_block_size, v is not None,
        )  # fmt: skip


@lru_cache(maxsize=512)
def _problem_of(
    device: torch.device, dtype: torch.dtype, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int,
    options: AttnOptions, has_sink: bool, needs_backward: bool, topk: int, q_block: int, k_block: int, has_v: bool,
) -> IndexProblem:  # fmt: skip
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return IndexProblem(
        device.type, dtype, heads_q, heads_kv, head_dim, head_dim_v, options, has_sink, needs_backward, capability,
        topk, q_block, k_block, has_v,
    )  # fmt: skip


@runtime_checkable
class IndexBackend(Protocol):
    """One implementation of index attention. Stateless; any strides of q, k, v and dout are accepted.

    The caller adds sinks, by ``lse``, and computes ``max_logits``: an implementation knows neither. Scale, softcap,
    ``deterministic`` and ``sm_margin`` are in ``problem.options``. v is None where ``problem.has_v`` is False.
    """

    @property
    def name(self) -> str: ...

    def why_not(self, problem: IndexProblem) -> str | None:
        """None if it can run the problem, else a sentence."""
        ...

    def forward(
        self, problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)``: out in q's dtype or, where the caller has to round it once more (``problem.has_sink``),
        preferably in the accumulation dtype, which lse always has. A query without keys gives 0 and -inf."""
        ...

    def backward(
        self, problem: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices, delta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """``(dq, dk, dv)`` in any floating dtype; out and lse are the final ones of each row, with the sink.
        ``delta`` (Tq, Hq), as of ``Backend.backward``, is given where lse has a gradient.

        Without v ``dv`` is None, and the gradient of the values is in the first columns of ``dk``.
        """
        ...
