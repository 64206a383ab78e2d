# SPDX-License-Identifier: Apache-2.0
"""Reads the documents of Megatron's ``PackedSeqParams`` (qkv_format "thd"), with and without pads."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from magi_attention.common.infer import as_cu_seqlens
from magi_attention.errors import ContractError, UnsupportedError

_CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class Documents(NamedTuple):
    """Documents of a batch in the sequence of all ranks. ``name``: of the tensor that gave ``bounds``."""

    bounds: tuple[int, ...]  # tokens, pads included
    lengths: tuple[int, ...] | None = None  # tokens without pads; None where no document has any
    name: str = "cu_seqlens_q"


class DocumentCache:
    """The documents of recent batches, so that all layers of a batch read its cu_seqlens from the GPU once.

    A batch is known by its tensors, their addresses and their versions, which torch counts up at each write. So another
    tensor and a write in place are read anew. The replay of a CUDA graph, NumPy and ``.data`` write without counting:
    make a new tensor after these.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity  # batches; a pipeline has some under way
        self._found: dict[tuple, tuple[list[weakref.ref], Documents]] = {}
        self._lock = threading.Lock()  # recomputation in the backward pass has threads of its own

    def read(self, packed: Any) -> Documents:
        """The documents of ``packed``, PackedSeqParams whose cu_seqlens are integers (documents + 1,). Those of queries
        say which; those of keys have to end where they do."""
        given = [(name, cu) for name in _CU_SEQLENS if (cu := getattr(packed, name)) is not None]
        if packed.qkv_format != "thd":
            raise UnsupportedError(f"qkv_format is {packed.qkv_format!r}; pack documents with qkv_format 'thd'.")
        if not all(isinstance(cu, torch.Tensor) and not cu.is_inference() for _, cu in given):
            return _read(dict(given))  # these have no version
        key = tuple((name, id(cu), cu.data_ptr(), cu._version) for name, cu in given)
        with self._lock:
            # An id may serve again when its tensor has gone, and the weak reference tells.
            refs, found = self._found.get(key, ([], None))
            if found is not None and all(ref() is cu for ref, (_, cu) in zip(refs, given)):
                return found
            self._found.pop(key, None)
        found = _read(dict(given))
        with self._lock:
            self._found[key] = [weakref.ref(cu) for _, cu in given], found
            while len(self._found) > self._capacity:
                del self._found[next(iter(self._found))]
        return found


def _read(given: dict[str, Any]) -> Documents:
    if "cu_seqlens_q" not in given:
        raise ContractError("cu_seqlens_q is None; give the cumulative lengths of documents, without pads.")
    read: dict[int, np.ndarray] = {}
    for name, tensor in given.items():
        if id(tensor) not in read:  # often q and kv are one
            read[id(tensor)] = as_cu_seqlens(tensor, name)
    cu = {name: read[id(tensor)] for name, tensor in given.items()}
    bounds_name = "cu_seqlens_q_padded" if "cu_seqlens_q_padded" in cu else "cu_seqlens_q"
    for name, like in (("cu_seqlens_kv", "cu_seqlens_q"), ("cu_seqlens_kv_padded", bounds_name)):
        if name in cu and cu[name][-1] != cu[like][-1]:
            raise ContractError(
                f"{name} is {_few(cu[name])}, and {like} is {_few(cu[like])}; give the same for both, as "
                "self-attention has one sequence."
            )
    bounds, real = cu[bounds_name], cu["cu_seqlens_q"]
    if len(bounds) != len(real) or (np.diff(real) > np.diff(bounds)).any():
        raise ContractError(
            f"cu_seqlens_q is {_few(real)}, and cu_seqlens_q_padded is {_few(bounds)}; give both for the same "
            "documents, none of them longer than with its pads."
        )
    lengths = None if np.array_equal(bounds, real) else tuple(np.diff(real).tolist())
    return Documents(tuple(bounds.tolist()), lengths, bounds_name)


def _few(cu: np.ndarray) -> str:
    return f"{cu.tolist()}" if len(cu) <= 9 else f"[{', '.join(map(str, cu[:8].tolist()))}, ... {cu[-1]}]"
