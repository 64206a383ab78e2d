# SPDX-License-Identifier: Apache-2.0
"""The masks of the benchmarks, each as slices and as a predicate for peers that take one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from magi_attention.api import Mask

WINDOW = 1024  # keys that a query sees in the sliding window, itself included
BLOCK = 2048  # tokens of a block of the block-causal mask
NAMES = (
    "full",
    "causal",
    "varlen_full",
    "varlen_causal",
    "sliding_window_causal",
    "varlen_block_causal",
)
# Short causal documents, and at the end a few queries that see all keys: not one of the six that are run by default.
SHARED_KEYS = "shared_keys"
ALL_NAMES = (*NAMES, SHARED_KEYS)
SHORT_DOCUMENT, READERS = 512, 256  # tokens of its documents, and of these queries
# Document lengths of a packed pre-training set: (first, last token count, weight).
_SHORT_DOCUMENTS = (
    (0, 256, 0.0766), (256, 512, 0.1651), (512, 768, 0.1246), (768, 1024, 0.0972), (1024, 1536, 0.1324),
    (1536, 2048, 0.0927), (2048, 2560, 0.0720), (2560, 3072, 0.0519), (3072, 3584, 0.0379), (3584, 4096, 0.0264),
    (4096, 5120, 0.0380), (5120, 6144, 0.0245), (6144, 7168, 0.0145), (7168, 8192, 0.0097), (8192, 10240, 0.0122),
    (10240, 15360, 0.0128), (15360, 20480, 0.0051), (20480, 65536, 0.0064),
)  # fmt: skip


def sample_documents(total: int, seed: int) -> list[int]:
    """Document lengths that add up to ``total``: an interval by weight, a uniform length in it, the last one cut."""
    rng = random.Random(seed)
    weights = [weight for *_, weight in _SHORT_DOCUMENTS]
    lengths: list[int] = []
    left = total
    while left:
        low, high, _ = rng.choices(_SHORT_DOCUMENTS, weights)[0]
        lengths.append(min(rng.randint(low + 1, high), left))
        left -= lengths[-1]
    return lengths


@dataclass(frozen=True)
class Case:
    """One mask over ``seqlen`` queries and keys. ``documents`` are lengths; one for masks without documents. ``keys``
    are those that a query sees in a sliding window; None for ``WINDOW``."""

    name: str
    seqlen: int
    documents: tuple[int, ...]
    keys: int | None = None

    @property
    def is_causal(self) -> bool:
        return self.name in ("causal", "varlen_causal", "sliding_window_causal")

    @property
    def readers(self) -> int:
        """Queries at the end of ``SHARED_KEYS`` that see all keys."""
        return min(READERS, self.seqlen // 4)

    @property
    def is_varlen(self) -> bool:
        return self.name.startswith("varlen")

    @property
    def window(self) -> int | None:
        return (self.keys or WINDOW) if self.name == "sliding_window_causal" else None

    @cached_property
    def cu_seqlens(self) -> list[int]:
        return [0, *np.cumsum(self.documents).tolist()]

    @cached_property
    def mask(self) -> Mask:
        if self.name == "full":
            return Mask.full(self.seqlen)
        if self.name == "causal":
            return Mask.causal(self.seqlen)
        if self.name == "sliding_window_causal":
            return Mask.sliding_window(self.seqlen, (self.window - 1, 0))
        if self.name == "varlen_block_causal":
            return Mask.block_causal(self.cu_seqlens, BLOCK)
        if self.name == SHARED_KEYS:
            return self._shared_keys()
        return Mask.varlen(self.cu_seqlens, causal=self.is_causal)

    def _shared_keys(self) -> Mask:
        """Causal documents of ``SHORT_DOCUMENT`` tokens, and ``readers`` queries that see all before them."""
        first = self.seqlen - self.readers
        queries = [[a, min(a + SHORT_DOCUMENT, first)] for a in range(0, first, SHORT_DOCUMENT)]
        keys = [*queries, [0, self.seqlen]]
        return Mask.from_slices([*queries, [first, self.seqlen]], keys, "causal", self.seqlen, self.seqlen)

    @cached_property
    def document_of(self) -> np.ndarray:
        """(seqlen,) index of the document of each token."""
        return np.repeat(np.arange(len(self.documents)), self.documents)

    @cached_property
    def block_end_of(self) -> np.ndarray:
        """(seqlen,) end of the block of each token, a key of its document's blocks being visible below it."""
        start = np.repeat(self.cu_seqlens[:-1], self.documents)
        end = np.repeat(self.cu_seqlens[1:], self.documents)
        position = np.arange(self.seqlen) - start
        return np.minimum(start + (position // BLOCK + 1) * BLOCK, end)

    def predicate(self, tensor: Callable) -> Callable | None:
        """``mask_mod(batch, head, q, k)`` on index tensors, None for the full mask.

        ``tensor`` moves an int64 array to the device. Written from the definition of the mask, not from its
        slices, so that the two check each other.
        """
        if self.name == "full":
            return None
        if self.name == "causal":
            return lambda b, h, q, k: k <= q
        if self.name == "sliding_window_causal":
            window = self.window
            return lambda b, h, q, k: (k <= q) & (k > q - window)
        if self.name == SHARED_KEYS:
            first = self.seqlen - self.readers
            return lambda b, h, q, k: (k <= q) & ((q >= first) | (k // SHORT_DOCUMENT == q // SHORT_DOCUMENT))
        document = tensor(self.document_of)
        if self.name == "varlen_full":
            return lambda b, h, q, k: document[q] == document[k]
        if self.name == "varlen_causal":
            return lambda b, h, q, k: (document[q] == document[k]) & (k <= q)
        block_end = tensor(self.block_end_of)
        return lambda b, h, q, k: (document[q] == document[k]) & (k < block_end[q])


def make_case(
    name: str, seqlen: int, sample: int = 0, document: int | None = None, window: int | None = None
) -> Case:
    """The case ``name`` of ``ALL_NAMES``; varlen ones draw their documents with seed ``sample``, or have documents of
    ``document`` tokens, of which the last is cut. ``window``: see ``Case.keys``."""
    if name not in ALL_NAMES:
        raise ValueError(f"Unknown mask {name!r}; use {', '.join(ALL_NAMES)}.")
    if not name.startswith("varlen"):
        documents = [seqlen]
    elif document is None:
        documents = sample_documents(seqlen, sample)
    else:
        documents = [min(document, seqlen - at) for at in range(0, seqlen, document)]
    return Case(name, seqlen, tuple(documents), window)
