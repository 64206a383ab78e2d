# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention: which keys a query may see, the best of them, and the loss that trains it.

``topk`` and ``kl`` are the arithmetic, in plain torch on any device; ``custom_ops`` is what callers run. On Hopper
GPUs kernels of ``hopper`` take the place of ``topk.best_keys``, and those of ``kl_hopper`` that of ``kl`` over lists.
"""

from magi_attention.kernels.indexer.visible import Blocks, Visible

__all__ = ["Blocks", "Visible"]
