# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention: which keys a query may see, the best of them, and the loss that trains it.

``topk`` and ``kl`` are all the arithmetic there is, in plain torch on any device; ``custom_ops`` is what callers run. A
kernel takes the place of ``best_keys``, ``kl_forward`` or ``kl_backward`` there.
"""

from magi_attention.kernels.indexer.visible import Blocks, Visible

__all__ = ["Blocks", "Visible"]
