# SPDX-License-Identifier: Apache-2.0
"""Attention of each query to a list of keys of its own.

``types`` has the interface of an implementation, ``choice`` the list of implementations, ``reference`` the one in plain
torch, ``ffa`` the one by kernels with its prepared ``launches``, ``custom_ops`` what callers run. ``prepare`` makes
lists and ``invert`` says who reads a key.
"""

from magi_attention.kernels.index_attn.choice import backends, choose, has_kernel
from magi_attention.kernels.index_attn.invert import Kept, with_kept_readers, with_readers
from magi_attention.kernels.index_attn.prepare import lists_of_blocks, prepare_indices
from magi_attention.kernels.index_attn.types import IndexBackend, IndexProblem, PreparedIndices

__all__ = ["IndexBackend", "IndexProblem", "Kept", "PreparedIndices", "backends", "choose", "has_kernel"]
__all__ += ["lists_of_blocks", "prepare_indices", "with_kept_readers", "with_readers"]
